"""A device and its clock: CUDA with events, or the host where there is no GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vlexport.errors import UnsupportedError

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Seconds of one call: on the device, and on the wall until the device is done."""

    device: float
    wall: float


class Host:
    """The processor: a clock for rehearsals, without captures and without memory of a device.

    Bytes are None where nobody counts them: `allocated` by tensors, `reserved` by the allocator, and `peak`,
    the most that a call took beyond what was held before it.
    """

    name = "cpu"
    no_graphs = "no CUDA device: nothing is captured"

    @property
    def torch(self) -> torch.device:
        return torch.device(self.name)

    def sample(self, call: Call) -> Sample:
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        return Sample(device=seconds, wall=seconds)

    def wait(self) -> None:
        """Return once all work is done."""

    def allocated(self) -> int | None:
        return None

    def reserved(self) -> int | None:
        return None

    def peak(self, call: Call) -> int | None:
        call()
        return None

    def capture(self, call: Call) -> Call:
        """Return a replay of what the call puts on the device."""
        raise UnsupportedError(self.no_graphs)


class Cuda(Host):
    """The first GPU."""

    name = "cuda"
    no_graphs = ""

    def sample(self, call: Call) -> Sample:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        first.record()
        call()
        last.record()
        last.synchronize()
        wall = time.perf_counter() - started
        return Sample(device=first.elapsed_time(last) / 1e3, wall=wall)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def allocated(self) -> int | None:
        return torch.cuda.memory_allocated()

    def reserved(self) -> int | None:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def peak(self, call: Call) -> int | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def capture(self, call: Call) -> Call:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        replay: Call = graph.replay
        return replay


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Return milliseconds: median and 90th percentile on the device, median on the wall."""
    device = sorted(each.device for each in samples)
    return {
        "p50_ms": 1e3 * statistics.median(device),
        "p90_ms": 1e3 * device[min(len(device) - 1, int(0.9 * len(device)))],
        "wall_p50_ms": 1e3 * statistics.median(each.wall for each in samples),
        "rounds": len(device),
    }


def repeat(device: Host, call: Call, rounds: int, warm: int = 3) -> dict[str, Any]:
    for _ in range(warm):
        call()
    return summary([device.sample(call) for _ in range(rounds)])
