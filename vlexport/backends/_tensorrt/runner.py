"""Running an engine on a GPU: profile by shape, one stream, captured calls, kernels kept between processes.

A call of new shapes runs as it is, which warms the library up. The second one of the same shapes is captured
in a CUDA graph, and later ones are replays. A graph holds for one context, so each call has a context of its
own; they share scratch memory, because they run one after another.

Never run so far: no GPU of the right kind was at hand.
"""

from __future__ import annotations

import importlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from vlexport.backends import EngineSpec, Runner
from vlexport.backends._tensorrt.messages import Bounds, Record
from vlexport.backends._tensorrt.network import Log
from vlexport.bundle.user_folders import CacheFile
from vlexport.errors import LimitError, MisfitError, ResourceError, VlexportError
from vlexport.target import device_here

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Profiles = Mapping[str, Mapping[str, Bounds]]
# Calls of other shapes that are kept, and the memory of the GPU that their buffers may take.
MOST_CALLS, MOST_BYTES = 8, 2**30
# The library refuses no memory at all, even where it needs none.
LEAST_BYTES = 256


def open_runner(module: str, content: bytes, record: Record, spec: EngineSpec) -> Runner:
    """Deserialise an engine; the manifest has been found to fit before."""
    library: Any = importlib.import_module(module)
    log = Log(library)
    engine = library.Runtime(log.logger).deserialize_cuda_engine(content)
    if engine is None:
        raise MisfitError(f"{module} {library.__version__} does not load this engine: {log.reason()}")
    name = sha256(record.to_json().encode()).hexdigest()[:16]
    cache = CacheFile.of("tensorrt", "kernels", module, str(library.__version__), device_here(), name)
    contexts = Contexts(library, engine, record.profiles, cache, log)
    return EngineRunner(contexts, {output.name: output.dtype for output in spec.outputs}, Gpu())


def profile_of(profiles: Profiles, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of the first profile that all shapes are in."""
    misses = []
    for index, (name, inputs) in enumerate(profiles.items()):
        for tensor, shape in shapes.items():
            low, _, high = inputs[tensor]
            if not all(least <= size <= most for least, size, most in zip(low, shape, high, strict=True)):
                misses.append(f"{name}: {tensor} {list(shape)} is outside {list(low)} to {list(high)}")
                break
        else:
            return index
    raise LimitError(
        f"no profile of this engine holds this call ({'; '.join(misses)}). Send less at once, or build with "
        "one that does."
    )


class Gpu:
    """The first GPU that torch has, and one stream of it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        caller = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(caller)
            yield

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cuda")

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        replay: Callable[[], None] = graph.replay
        return replay

    def wait(self) -> None:
        self._stream.synchronize()


class Contexts:
    """Execution contexts that bring no memory of their own.

    TensorRT for RTX compiles kernels for the shapes that it meets, in the background. It captures graphs
    itself, since it alone knows when those kernels are there, and lets them be kept for the next process.
    """

    def __init__(self, library: Any, engine: Any, profiles: Profiles, cache: CacheFile, log: Log) -> None:
        self._library, self._engine, self._cache = library, engine, cache
        self.profiles, self.log = profiles, log
        self.captures = hasattr(library, "CudaGraphStrategy")
        self._kernels = self._recall() if hasattr(library, "IRuntimeCache") else None

    def create(self, profile: int, stream: int) -> Any:
        how = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._kernels is not None:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(how)
            config.set_runtime_cache(self._kernels)
            if self.captures:
                config.cuda_graph_strategy = self._library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            how = config
        context = self._engine.create_execution_context(how)
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise ResourceError(
                f"TensorRT could not make room for profile '{list(self.profiles)[profile]}': "
                f"{self.log.reason()}. Free GPU memory, or build with a smaller profile."
            )
        return context

    def _recall(self) -> Any:
        kernels = self._engine.create_runtime_config().create_runtime_cache()
        content = self._cache.read()
        if content and not kernels.deserialize(content):
            logger.info("%s is of another machine or damaged; kernels are compiled anew", self._cache.path)
        return kernels

    def close(self) -> None:
        if self._kernels is not None:
            content = self._kernels.serialize()
            if content is not None:
                self._cache.write(bytes(content))
        self._kernels = self._engine = None


@dataclass(kw_only=True, slots=True)
class Call:
    """One set of shapes in one profile: tensors on the GPU, and pinned ones of the host that feed them."""

    context: Any
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]
    received: Mapping[str, Tensor]
    replay: Callable[[], None] | None = None
    num_runs: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.inputs.values(), *self.outputs.values()))


class EngineRunner(Runner):
    """Calls on one stream, kept by their shapes; the least recently used one is given up first."""

    def __init__(self, contexts: Contexts, outputs: Mapping[str, str], gpu: Gpu) -> None:
        self._contexts, self._outputs, self._gpu = contexts, outputs, gpu
        self._captures = not contexts.captures
        self._kept: OrderedDict[tuple[int, object], Call] = OrderedDict()
        self._scratch: Tensor | None = None
        self.num_replays = 0

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        profile = profile_of(self._contexts.profiles, shapes)
        try:
            with self._gpu.current():
                call = self._call(profile, tensors)
                for name, tensor in tensors.items():
                    source = tensor if tensor.is_cuda else call.sent[name].copy_(tensor)
                    call.inputs[name].copy_(source, non_blocking=True)
                self._compute(call)
                for name, tensor in call.outputs.items():
                    call.received[name].copy_(tensor, non_blocking=True)
                self._gpu.wait()
        except torch.cuda.OutOfMemoryError as error:
            name = list(self._contexts.profiles)[profile]
            raise ResourceError(
                f"out of GPU memory in profile '{name}'. Send fewer items at once."
            ) from error
        return {name: tensor.clone() for name, tensor in call.received.items()}

    def close(self) -> None:
        self._forget()
        self._contexts.close()

    def _forget(self) -> None:
        self._kept.clear()
        self._scratch = None

    def _compute(self, call: Call) -> None:
        def launch() -> None:
            if not call.context.execute_async_v3(self._gpu.stream):
                raise VlexportError(f"TensorRT failed to run: {self._contexts.log.reason()}")

        is_capturable = getattr(call.context, "is_stream_capturable", lambda _: True)
        if call.num_runs == 1 and self._captures and is_capturable(self._gpu.stream):
            try:
                call.replay = self._gpu.capture(launch)
            except torch.cuda.OutOfMemoryError:
                raise
            except (RuntimeError, VlexportError) as error:
                # This call and all later ones run as they are.
                self._captures = False
                logger.warning("calls are not captured in CUDA graphs, which costs time only: %s", error)
        call.num_runs += 1
        self.num_replays += call.replay is not None
        (call.replay or launch)()

    def _call(self, profile: int, tensors: Mapping[str, Tensor]) -> Call:
        key = (profile, tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))
        call = self._kept[key] = self._kept.get(key) or self._prepare(profile, tensors)
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and (
            len(self._kept) > MOST_CALLS or sum(kept.num_bytes for kept in self._kept.values()) > MOST_BYTES
        ):
            self._kept.popitem(last=False)
        return call

    def _prepare(self, profile: int, tensors: Mapping[str, Tensor]) -> Call:
        context = self._contexts.create(profile, self._gpu.stream)
        for name, tensor in tensors.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise VlexportError(
                    f"TensorRT refuses {name} of {list(tensor.shape)}, which its profile holds: "
                    f"{self._contexts.log.reason()}"
                )
        # Scratch memory for these shapes, not for the largest that the profile holds.
        size = max(LEAST_BYTES, context.update_device_memory_size_for_shapes())
        if self._scratch is None or self._scratch.nbytes < size:
            # Graphs have the address of the old memory in them.
            self._forget()
            self._scratch = self._gpu.empty((size,), torch.uint8)
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.nbytes)
        results = {
            name: (tuple(context.get_tensor_shape(name)), getattr(torch, dtype))
            for name, dtype in self._outputs.items()
        }
        inputs = {name: self._gpu.empty(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        outputs = {name: self._gpu.empty(*result) for name, result in results.items()}
        for name, tensor in (*inputs.items(), *outputs.items()):
            context.set_tensor_address(name, tensor.data_ptr())
        return Call(
            context=context,
            inputs=inputs,
            outputs=outputs,
            sent={name: self._gpu.pinned(tensor.shape, tensor.dtype) for name, tensor in tensors.items()},
            received={name: self._gpu.pinned(*result) for name, result in results.items()},
        )
