"""Calls of a few fixed sizes, each captured once and replayed with the buffers filled anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vlexport.backends import EngineSpec
from vlexport.specs import Dim, Symbol, bind, size_of
from vlexport.vision.attention.cu_seqlens import is_bounds
from vlexport.vision.static_shapes import refill, to_device

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Call = Callable[[dict[str, "Tensor"]], dict[str, "Tensor"]]
Sizes = Mapping[Symbol, int]
Capture = Callable[[Call, dict[str, "Tensor"]], "Captured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """Buffers that a replay reads, and those that it leaves its outputs in."""

    buffers: dict[str, Tensor]
    outputs: dict[str, Tensor]
    replay: Callable[[], None]


class CapturedCalls:
    """A function of tensors, run in the smallest size that holds a call; one above all of them runs as it is.

    On CUDA a size is captured when it is first needed, or by `warm_up`, and keeps its buffers; elsewhere a
    replay is a plain call on the same padded buffers, which tests padding without a GPU. Where the capture of
    a size failed, its calls run as they are.
    """

    def __init__(
        self,
        function: Call,
        spec: EngineSpec,
        sizes: Sequence[Sizes],
        device: str,
        capture: Capture | None = None,
    ) -> None:
        self.function = function
        self.spec = spec
        self.sizes = sorted(sizes, key=lambda counts: tuple(counts.values()))
        self.device = torch.device(device)
        self.capture = capture or (Graphs(self.device) if self.device.type == "cuda" else as_call)
        self.captured: dict[int, Captured] = {}
        self.failures: dict[int, str] = {}
        self.num_replays = 0
        self.num_as_they_are = 0

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(sorted({_size(self.spec.outputs[0].shape[0], sizes) for sizes in self.sizes}))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture every size now, largest first: the smaller ones then live in the memory of its work."""
        for place in reversed(range(len(self.sizes))):
            self._ready(place)

    @torch.inference_mode()
    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = bind(self.spec.inputs, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        inputs = {name: to_device(tensor, self.device) for name, tensor in tensors.items()}
        places = (
            place
            for place, sizes in enumerate(self.sizes)
            if all(count <= sizes.get(symbol, 0) for symbol, count in values.items())
        )
        place = next(places, None)
        captured = None if place is None else self._ready(place)
        if captured is None:
            self.num_as_they_are += 1
            return self.function(inputs)
        self.num_replays += 1
        for name, buffer in captured.buffers.items():
            refill(buffer, inputs[name], "repeat_last" if is_bounds(name) else "zero")
        captured.replay()
        rows = {spec.name: _size(spec.shape[0], values) for spec in self.spec.outputs}
        return {name: captured.outputs[name][:count].clone() for name, count in rows.items()}

    def _ready(self, place: int) -> Captured | None:
        if place in self.captured or place in self.failures:
            return self.captured.get(place)
        sizes = self.sizes[place]
        buffers = {}
        for spec in self.spec.inputs:
            shape, dtype = [_size(dim, sizes) for dim in spec.shape], getattr(torch, spec.dtype)
            buffers[spec.name] = torch.zeros(shape, dtype=dtype, device=self.device)
        try:
            self.captured[place] = self.capture(self.function, buffers)
        except torch.cuda.OutOfMemoryError:
            # What is short now may be there later.
            raise
        except RuntimeError as error:
            self.failures[place] = str(error)
            logger.warning("calls of up to %s run uncaptured: %s", dict(sizes), error)
        return self.captured.get(place)


class Graphs:
    """Captures of one device, whose work shares one pool of memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Call, buffers: dict[str, Tensor]) -> Captured:
        """Capture after warming up on a side stream: libraries choose and allocate in first calls."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                function(buffers)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outputs = function(buffers)
        return Captured(buffers=buffers, outputs=outputs, replay=graph.replay)


def as_call(function: Call, buffers: dict[str, Tensor]) -> Captured:
    """Return a capture whose replay is a call that leaves its outputs in place, where there are no graphs."""
    outputs = function(buffers)

    def replay() -> None:
        for name, rows in function(buffers).items():
            outputs[name].copy_(rows)

    return Captured(buffers=buffers, outputs=outputs, replay=replay)


def _size(dim: Dim, values: Sizes) -> int:
    size = size_of(dim, values)
    assert size is not None, "calls and captures have a size for every symbol"
    return size
