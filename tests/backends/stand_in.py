"""Stand-ins for a GPU and for TensorRT's side of running: they compute, and trip over what is forbidden."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from vlexport.backends._tensorrt.api import Log
from vlexport.backends._tensorrt.gpu import CaptureError


class HostGpu:
    """Memory of the host, found again by its address as long as somebody holds it."""

    stream = 7

    def __init__(self) -> None:
        self.memory: dict[int, weakref.ref[Tensor]] = {}
        self.recorded: list[Callable[[], None]] | None = None
        self.num_captures = 0
        self.refuses = False

    def room(self, shape: Sequence[int], dtype: str) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        self.memory[tensor.data_ptr()] = weakref.ref(tensor)
        return tensor

    def pinned(self, shape: Sequence[int], dtype: str) -> Tensor:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))

    def at(self, address: int) -> Tensor:
        found = self.memory[address]()
        assert found is not None, "memory that was given back is used"
        return found

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        if self.refuses:
            raise CaptureError("operation not permitted when stream is capturing")
        self.recorded = []
        launch()
        steps, self.recorded = self.recorded, None

        def replay() -> None:
            for step in steps:
                step()

        return replay

    def wait(self) -> None:
        assert self.recorded is None


class Context:
    """Gives every row's sum, times the number of the profile plus one."""

    def __init__(self, gpu: HostGpu, profile: int = 0) -> None:
        self.gpu, self.profile = gpu, profile
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch = 0
        self.num_changes = 0
        self.capturable = True

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile, self.num_changes = profile, self.num_changes + 1
        return stream == self.gpu.stream

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name], self.num_changes = shape, self.num_changes + 1
        return True

    def update_device_memory_size_for_shapes(self) -> int:
        return 10 * self.shapes["x"][0]

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self.update_device_memory_size_for_shapes()
        self.scratch, self.num_changes = address, self.num_changes + 1

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.shapes["x"][0],)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name], self.num_changes = address, self.num_changes + 1
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return self.capturable

    def execute_async_v3(self, stream: int) -> bool:
        changes = self.num_changes

        def step() -> None:
            assert changes == self.num_changes, "a context was changed after its graph was captured"
            self.gpu.at(self.scratch)
            found = self.gpu.at(self.addresses["x"]).sum(1) * (self.profile + 1)
            self.gpu.at(self.addresses["y"]).copy_(found)

        if self.gpu.recorded is None:
            step()
        else:
            self.gpu.recorded.append(step)
        return True


class RuntimeCache:
    def __init__(self) -> None:
        self.content = b""

    def deserialize(self, content: bytes) -> bool:
        fits = content.startswith(b"kernels")
        self.content = content if fits else self.content
        return fits

    def serialize(self) -> bytes:
        return self.content + b"kernels"


class RuntimeConfig:
    """Keeps what it is told."""

    strategy: str = ""
    cuda_graph_strategy: str = ""
    cache: RuntimeCache | None = None

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self.cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy


class DeserialisedEngine:
    """Remembers what its contexts were made from."""

    def __init__(self, gpu: HostGpu) -> None:
        self.gpu = gpu
        self.asked: list[object] = []

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, asked: object) -> Context:
        self.asked.append(asked)
        return Context(self.gpu)


STRATEGIES = SimpleNamespace(USER_MANAGED="by hand")
DATA_CENTRE = SimpleNamespace(ExecutionContextAllocationStrategy=STRATEGIES)
RTX = SimpleNamespace(
    ExecutionContextAllocationStrategy=STRATEGIES,
    CudaGraphStrategy=SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole"),
    IRuntimeCache=RuntimeCache,
)


class Logger:
    """Never called."""

    Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0, WARNING=2, INFO=3)


SILENT = Log(SimpleNamespace(ILogger=Logger))
