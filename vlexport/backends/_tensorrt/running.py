"""Running an engine on a GPU: profile by shape, one context and stream each, buffers of torch.

Never run so far: no GPU of the right kind was at hand.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlexport.backends import EngineSpec, Runner
from vlexport.backends._tensorrt.asking import Log
from vlexport.backends._tensorrt.job import Bounds, Record
from vlexport.errors import LimitError, MisfitError, ResourceError, VlexportError

if TYPE_CHECKING:
    from torch import Tensor


def open_runner(module: str, content: bytes, record: Record, spec: EngineSpec) -> Runner:
    """Deserialise; the manifest has been found to fit before."""
    library: Any = importlib.import_module(module)
    log = Log(library)
    runtime = library.Runtime(log.logger)
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise MisfitError(f"{module} {library.__version__} does not load this engine: {log.reason()}")
    return EngineRunner(engine, log, record.profiles, spec)


def profile_of(profiles: Mapping[str, Mapping[str, Bounds]], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The first profile that all shapes lie in."""
    for name, inputs in profiles.items():
        if all(_inside(shape, inputs[each]) for each, shape in shapes.items()):
            return name
    nearest = {
        name: next(each for each, shape in shapes.items() if not _inside(shape, inputs[each]))
        for name, inputs in profiles.items()
    }
    told = "; ".join(
        f"{name}: {each} {list(shapes[each])} is outside {list(profiles[name][each][0])} to "
        f"{list(profiles[name][each][2])}"
        for name, each in nearest.items()
    )
    raise LimitError(
        f"no profile of this engine holds this call ({told}). Send less at once, or build with one that does."
    )


def _inside(shape: tuple[int, ...], bounds: Bounds) -> bool:
    low, _, high = bounds
    return all(least <= size <= most for least, size, most in zip(low, shape, high, strict=True))


class EngineRunner:
    """One execution context for each profile, made when first needed."""

    def __init__(
        self, engine: Any, log: Log, profiles: Mapping[str, Mapping[str, Bounds]], spec: EngineSpec
    ) -> None:
        import torch

        self._engine, self._log, self._profiles, self._spec = engine, log, profiles, spec
        self._contexts: dict[str, Any] = {}
        self._stream = torch.cuda.Stream()

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        name = profile_of(self._profiles, {each: tuple(tensor.shape) for each, tensor in tensors.items()})
        context = self._context(name)
        try:
            with torch.cuda.stream(self._stream):
                given = {
                    each: tensor.cuda(non_blocking=True).contiguous() for each, tensor in tensors.items()
                }
                for each, tensor in given.items():
                    context.set_input_shape(each, tuple(tensor.shape))
                    context.set_tensor_address(each, tensor.data_ptr())
                found = {
                    spec.name: self._bound(context, spec.name, spec.dtype) for spec in self._spec.outputs
                }
                fine = context.execute_async_v3(self._stream.cuda_stream)
                results = {each: tensor.cpu() for each, tensor in found.items()}
            self._stream.synchronize()
        except torch.cuda.OutOfMemoryError as error:
            raise ResourceError(
                f"out of GPU memory in profile '{name}'. Send fewer items at once."
            ) from error
        if not fine:
            raise VlexportError(f"TensorRT failed in profile '{name}': {self._log.reason()}")
        return results

    def _bound(self, context: Any, name: str, dtype: str) -> Tensor:
        import torch

        kind: torch.dtype = getattr(torch, dtype)
        tensor = torch.empty(tuple(context.get_tensor_shape(name)), dtype=kind, device="cuda")
        context.set_tensor_address(name, tensor.data_ptr())
        return tensor

    def _context(self, name: str) -> Any:
        if name not in self._contexts:
            context = self._engine.create_execution_context()
            if context is None:
                raise ResourceError(
                    f"TensorRT could not make room for profile '{name}': {self._log.reason()}. "
                    "Free GPU memory, or build with a smaller profile."
                )
            context.set_optimization_profile_async(list(self._profiles).index(name), self._stream.cuda_stream)
            self._contexts[name] = context
        return self._contexts[name]

    def close(self) -> None:
        self._contexts = {}
        self._engine = None
