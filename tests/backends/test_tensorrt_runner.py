"""Running TensorRT engines against a stand-in for the library and the GPU; files kept between processes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlexport.backends import find_backend
from vlexport.backends._tensorrt import runner
from vlexport.backends._tensorrt.build_process import keep_timings, recall_timings
from vlexport.backends._tensorrt.network import Log
from vlexport.backends._tensorrt.runner import MOST_CALLS, Contexts, EngineRunner, Gpu
from vlexport.bundle.user_folders import CacheFile
from vlexport.errors import LimitError, ResourceError


class HostGpu(Gpu):
    """Memory of the host, found again by its address as long as somebody holds it."""

    stream = 7

    def __init__(self) -> None:
        self.memory: dict[int, weakref.ref[Tensor]] = {}
        self.recorded: list[Callable[[], None]] | None = None
        self.num_captures = 0
        self.refuses = False

    def current(self):
        return nullcontext()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.memory[tensor.data_ptr()] = weakref.ref(tensor)
        return tensor

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def at(self, address: int) -> Tensor:
        held = self.memory[address]()
        assert held is not None, "memory that was given back is used"
        return held

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
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
    """Gives every row's sum, times the number of the profile plus one; what is set is counted."""

    capturable = True

    def __init__(self, gpu: HostGpu) -> None:
        self.gpu, self.profile, self.scratch, self.num_changes = gpu, 0, 0, 0
        self.given: dict[str, Any] = {}

    def changed(self, **given: object) -> bool:
        self.num_changes += 1
        self.given |= given
        return True

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return self.changed() and stream == self.gpu.stream

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.changed(rows=shape[0])

    def update_device_memory_size_for_shapes(self) -> int:
        return 10 * int(self.given["rows"])

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self.update_device_memory_size_for_shapes()
        self.changed()
        self.scratch = address

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.given["rows"],)

    def set_tensor_address(self, name: str, address: int) -> bool:
        return self.changed(**{name: address})

    def is_stream_capturable(self, stream: int) -> bool:
        return self.capturable

    def execute_async_v3(self, stream: int) -> bool:
        changes = self.num_changes

        def step() -> None:
            assert changes == self.num_changes, "a context was changed after its graph was captured"
            self.gpu.at(self.scratch)
            sums = self.gpu.at(self.given["x"]).sum(1) * (self.profile + 1)
            self.gpu.at(self.given["y"]).copy_(sums)

        if self.gpu.recorded is None:
            step()
        else:
            self.gpu.recorded.append(step)
        return True


class RuntimeCache:
    content = b""

    def deserialize(self, content: bytes) -> bool:
        fits = content.startswith(b"kernels")
        self.content = content if fits else self.content
        return fits

    def serialize(self) -> bytes:
        return self.content + b"kernels"


class RuntimeConfig:
    strategy = cuda_graph_strategy = ""
    cache: RuntimeCache | None = None
    create_runtime_cache = RuntimeCache

    def set_runtime_cache(self, cache: RuntimeCache) -> None:
        self.cache = cache

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy


class Engine:
    create_runtime_config = RuntimeConfig

    def __init__(self, gpu: HostGpu) -> None:
        self.gpu, self.contexts, self.given = gpu, list[Context](), list[Any]()

    def create_execution_context(self, given: object) -> Context:
        self.given.append(given)
        self.contexts.append(Context(self.gpu))
        return self.contexts[-1]


STRATEGIES = SimpleNamespace(USER_MANAGED="by hand")
DATA_CENTRE = SimpleNamespace(ExecutionContextAllocationStrategy=STRATEGIES)
RTX = SimpleNamespace(
    ExecutionContextAllocationStrategy=STRATEGIES,
    CudaGraphStrategy=SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole"),
    IRuntimeCache=RuntimeCache,
)
SEVERITY = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0, WARNING=2, INFO=3)
SILENT = Log(SimpleNamespace(ILogger=type("ILogger", (), {"Severity": SEVERITY})))
# Calls of up to 100 rows are of the first profile.
PROFILES = {
    "thumbnail": {"x": ((1, 1), (4, 3), (100, 10))},
    "image": {"x": ((1, 1), (500, 3), (1000, 10))},
}


@pytest.fixture
def engine() -> Engine:
    return Engine(HostGpu())


@pytest.fixture
def gpu(engine) -> HostGpu:
    made: HostGpu = engine.gpu
    return made


@pytest.fixture
def file(tmp_path) -> CacheFile:
    return CacheFile(path=tmp_path / "tensorrt" / "some.cache")


@pytest.fixture
def calls(gpu, engine, file) -> EngineRunner:
    return EngineRunner(Contexts(DATA_CENTRE, engine, PROFILES, file, SILENT), {"y": "float32"}, gpu)


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def check(calls: EngineRunner, given: Tensor) -> Tensor:
    found = calls.run({"x": given})["y"]
    assert {find_backend(name).rows_on for name in ("tensorrt", "tensorrt_rtx")} == {found.device.type}
    torch.testing.assert_close(found, given.sum(1) * (1 + (len(given) > 100)))
    return found


def test_the_first_call_of_a_shape_runs_as_it_is_and_later_ones_replay_a_capture_of_its_own(
    calls, gpu, engine
):
    for seed in range(3):
        for count in (400, 4, 3):
            check(calls, rows(count, seed))
    assert (calls.num_replays, gpu.num_captures, len(engine.contexts)) == (6, 3, 3)


def test_a_call_outside_every_profile_is_refused_with_the_nearest_bounds(calls):
    with pytest.raises(LimitError, match=r"thumbnail: x \[1001, 3\] is outside .*; image: x \[1001, 3\]"):
        calls.run({"x": rows(1001)})


def test_a_result_is_not_touched_by_the_next_call_and_rows_need_not_lie_side_by_side(calls):
    first = check(calls, rows(3, 0).T)
    kept = first.clone()
    check(calls, rows(3, 1).T)
    assert torch.equal(first, kept)


def test_the_call_that_was_not_used_longest_is_given_up(calls, engine: Engine):
    check(calls, rows(MOST_CALLS + 1))
    for count in range(1, MOST_CALLS + 1):
        check(calls, rows(count))
    assert len(engine.contexts) == MOST_CALLS + 1
    check(calls, rows(1))
    assert len(engine.contexts) == MOST_CALLS + 1
    check(calls, rows(MOST_CALLS + 1))
    assert len(engine.contexts) == MOST_CALLS + 2


def test_buffers_take_no_more_of_the_gpu_than_they_may(calls, engine: Engine, monkeypatch):
    monkeypatch.setattr(runner, "MOST_BYTES", 100)
    # 64 and 48 bytes: three numbers and their sum in four rows or three.
    for count in (4, 3, 4, 3):
        check(calls, rows(count))
    assert len(engine.contexts) == 4
    check(calls, rows(40))
    assert len(calls._kept) == 1, "one call is always kept, whatever it takes"


def test_a_call_that_needs_more_scratch_memory_ends_the_graphs_over_the_old_one(calls, gpu, engine: Engine):
    for seed in range(3):
        check(calls, rows(4, seed))
    check(calls, rows(400))
    for seed in range(3):
        check(calls, rows(4, seed))
    assert (gpu.num_captures, len(engine.contexts)) == (2, 3)
    assert len({context.scratch for context in engine.contexts[1:]}) == 1


def test_where_capturing_fails_calls_run_as_they_are_with_one_warning(calls, gpu: HostGpu, caplog):
    gpu.refuses = True
    with caplog.at_level(logging.WARNING):
        for seed in range(4):
            check(calls, rows(4, seed))
            check(calls, rows(3, seed))
    assert (calls.num_replays, gpu.num_captures) == (0, 1)
    (message,) = caplog.messages
    assert "which costs time only: operation not permitted when stream is capturing" in message


def test_what_cannot_be_captured_or_captures_by_itself_is_left_alone(calls, gpu, engine, file, monkeypatch):
    monkeypatch.setattr(Context, "capturable", False)
    by_itself = EngineRunner(Contexts(RTX, engine, PROFILES, file, SILENT), {"y": "float32"}, gpu)
    for seed in range(3):
        check(calls, rows(4, seed))
    monkeypatch.undo()
    for seed in range(3):
        check(by_itself, rows(4, seed))
    assert (calls.num_replays, by_itself.num_replays, gpu.num_captures) == (0, 0, 0)


def test_after_closing_nothing_is_held(calls, gpu: HostGpu):
    check(calls, rows(4))
    calls.close()
    assert [found() for found in gpu.memory.values() if found() is not None] == []


def test_memory_that_runs_out_is_named_with_the_profile(calls, gpu, engine, monkeypatch):
    def empty(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "empty", empty)
    with pytest.raises(ResourceError, match=r"out of GPU memory in profile 'image'\. Send fewer items"):
        calls.run({"x": rows(400)})
    monkeypatch.setattr(engine, "create_execution_context", lambda _: None)
    with pytest.raises(ResourceError, match=r"make room for profile 'image': the library gives no reason"):
        calls.run({"x": rows(400)})


def test_the_library_for_rtx_captures_by_itself_and_shares_one_cache(engine, file):
    contexts = Contexts(RTX, engine, PROFILES, file, SILENT)
    made = contexts.create(1, 7)
    contexts.create(0, 7)
    first, second = engine.given
    assert (first.strategy, first.cuda_graph_strategy) == ("by hand", "whole")
    assert first.cache is second.cache is not None
    assert (made.profile, contexts.captures) == (1, True)


def test_the_data_centre_library_has_no_such_cache_and_is_captured_by_us(engine, file):
    contexts = Contexts(DATA_CENTRE, engine, PROFILES, file, SILENT)
    contexts.create(1, 7)
    contexts.close()
    assert (engine.given, contexts.captures, file.read()) == (["by hand"], False, b"")


def test_kernels_are_kept_when_an_engine_closes_and_compiled_anew_where_they_do_not_fit(engine, file):
    for stored, kept in ((b"", b"kernels"), (b"kernels", b"kernelskernels"), (b"damaged", b"kernels")):
        file.write(stored)
        Contexts(RTX, engine, PROFILES, file, SILENT).close()
        assert file.read() == kept


class Timings:
    """A builder's configuration that takes timings of one GPU."""

    taken = b"?"

    def create_timing_cache(self, content: bytes) -> bytes | None:
        return None if content == b"damaged" else content

    def set_timing_cache(self, timings: bytes, ignore_mismatch: bool) -> bool:
        fine = timings in (b"", b"here") and not ignore_mismatch
        self.taken = timings if fine else self.taken
        return fine

    def get_timing_cache(self) -> Timings:
        return self

    def serialize(self) -> bytes:
        return self.taken + b"+"


@pytest.mark.parametrize(
    ("stored", "taken"), [(b"", b""), (b"here", b"here"), (b"elsewhere", b""), (b"damaged", b"")]
)
def test_timings_of_this_gpu_are_used_and_others_ignored(file: CacheFile, stored: bytes, taken: bytes):
    file.write(stored)
    config = Timings()
    recall_timings(config, file)
    assert config.taken == taken
    keep_timings(config, file)
    assert file.read() == taken + b"+"
