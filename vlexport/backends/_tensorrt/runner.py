"""Running an engine on a GPU: profile by shape, one stream, kernels kept between processes.

Never run so far: no GPU of the right kind was at hand.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from vlexport.backends import EngineSpec, Runner
from vlexport.backends._nvidia import device_here
from vlexport.backends._tensorrt.api import Log
from vlexport.backends._tensorrt.cache import CacheFile
from vlexport.backends._tensorrt.calls import Calls
from vlexport.backends._tensorrt.gpu import TorchGpu
from vlexport.backends._tensorrt.messages import Bounds, Record
from vlexport.errors import LimitError, MisfitError, ResourceError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def open_runner(module: str, content: bytes, record: Record, spec: EngineSpec) -> Runner:
    """Deserialise; the manifest has been found to fit before."""
    library: Any = importlib.import_module(module)
    log = Log(library)
    runtime = library.Runtime(log.logger)
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise MisfitError(f"{module} {library.__version__} does not load this engine: {log.reason()}")
    name = sha256(record.to_json().encode()).hexdigest()[:16]
    cache = CacheFile.of("kernels", module, str(library.__version__), device_here(), name)
    return EngineRunner(Contexts(library, engine, log, cache), record.profiles, spec)


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


class EngineRunner(Runner):
    """Calls run one after another on a stream of their own."""

    def __init__(
        self, contexts: Contexts, profiles: Mapping[str, Mapping[str, Bounds]], spec: EngineSpec
    ) -> None:
        self._contexts, self._profiles, self._turn = contexts, profiles, threading.Lock()
        self._gpu = TorchGpu()
        self.calls = Calls(
            create=self._create,
            outputs={each.name: each.dtype for each in spec.outputs},
            own_capture=not contexts.captures,
            gpu=self._gpu,
            log=contexts.log,
        )

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        name = profile_of(self._profiles, {each: tuple(tensor.shape) for each, tensor in tensors.items()})
        try:
            with self._turn, self._gpu.current():
                return self.calls.run(list(self._profiles).index(name), tensors)
        except torch.cuda.OutOfMemoryError as error:
            raise ResourceError(
                f"out of GPU memory in profile '{name}'. Send fewer items at once."
            ) from error

    def _create(self, profile: int) -> Any:
        return self._contexts.create(profile, list(self._profiles)[profile], self._gpu.stream)

    def close(self) -> None:
        """Give the GPU's memory back, and keep the kernels that were compiled."""
        self.calls.close()
        self._contexts.close()


class Contexts:
    """Makes execution contexts that bring no memory of their own.

    TensorRT for RTX compiles kernels for the shapes that it meets, in the background. It captures graphs
    itself, since it alone knows when those kernels are there, and lets them be kept for the next process.
    """

    def __init__(self, library: Any, engine: Any, log: Log, cache: CacheFile) -> None:
        self._library, self._engine, self.log, self._cache = library, engine, log, cache
        self.captures = hasattr(library, "CudaGraphStrategy")
        self._kernels = self._recall() if hasattr(library, "IRuntimeCache") else None

    def create(self, profile: int, name: str, stream: int) -> Any:
        """A context that is set to a profile."""
        by_hand = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._kernels is None:
            context = self._engine.create_execution_context(by_hand)
        else:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(by_hand)
            config.set_runtime_cache(self._kernels)
            if self.captures:
                config.cuda_graph_strategy = self._library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            context = self._engine.create_execution_context(config)
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise ResourceError(
                f"TensorRT could not make room for profile '{name}': {self.log.reason()}. "
                "Free GPU memory, or build with a smaller profile."
            )
        return context

    def _recall(self) -> Any:
        """Kernels of an earlier process, where they are for this very machine."""
        kernels = self._engine.create_runtime_config().create_runtime_cache()
        content = self._cache.read()
        if content and not kernels.deserialize(content):
            logger.info("%s is of another machine or damaged; kernels are compiled anew", self._cache.path)
        return kernels

    def close(self) -> None:
        if self._engine is not None and self._kernels is not None:
            kept = self._kernels.serialize()
            if kept is not None:
                self._cache.write(bytes(kept))
        self._kernels = self._engine = None
