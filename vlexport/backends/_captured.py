"""Calls of a few fixed sizes, each captured once and replayed with the buffers filled anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vlexport.backends import EngineSpec
from vlexport.specs import Dim, Symbol, bind
from vlexport.vision.bounds import PADDING
from vlexport.vision.static_shapes import refill

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[dict[str, "Tensor"]], dict[str, "Tensor"]]
Sizes = Mapping[Symbol, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """Buffers that a replay reads, and those that it leaves its outputs in."""

    buffers: dict[str, Tensor]
    outputs: dict[str, Tensor]
    replay: Callable[[], None]


class CapturedCalls:
    """A function of tensors, run in the smallest size that holds a call; one above all of them runs as it is.

    On CUDA a size is captured when it is first needed and keeps its buffers; elsewhere a replay is a plain
    call on the same padded buffers, which is how padding is tested without a GPU.
    """

    def __init__(self, function: Call, spec: EngineSpec, sizes: Sequence[Sizes], device: str) -> None:
        self.function = function
        self.spec = spec
        self.sizes = sorted(sizes, key=lambda each: tuple(each.values()))
        self.device = torch.device(device)
        self.captured: dict[int, Captured] = {}
        self.num_replays = 0
        self.num_as_they_are = 0

    @property
    def budgets(self) -> tuple[int, ...]:
        """Tokens of the calls of each size, ascending."""
        return tuple(_size(self.spec.outputs[0].shape[0], sizes) for sizes in self.sizes)

    @torch.inference_mode()
    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of the call, without the rows of the padding, in memory of their own."""
        values = bind(self.spec.inputs, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        place = self._smallest(values)
        if place is None:
            self.num_as_they_are += 1
            return self.function({name: tensor.to(self.device) for name, tensor in tensors.items()})
        captured = self.captured.get(place) or self._capture(place)
        self.num_replays += 1
        for name, buffer in captured.buffers.items():
            refill(buffer, tensors[name], PADDING.get(name, "zero"))
        captured.replay()
        rows = {spec.name: _size(spec.shape[0], values) for spec in self.spec.outputs}
        return {name: captured.outputs[name][:count].clone() for name, count in rows.items()}

    def _smallest(self, values: Sizes) -> int | None:
        fits = (
            at
            for at, sizes in enumerate(self.sizes)
            if all(count <= sizes.get(symbol, 0) for symbol, count in values.items())
        )
        return next(fits, None)

    def _capture(self, place: int) -> Captured:
        sizes = self.sizes[place]
        buffers = {
            spec.name: torch.zeros(
                [_size(dim, sizes) for dim in spec.shape],
                dtype=getattr(torch, spec.dtype),
                device=self.device,
            )
            for spec in self.spec.inputs
        }
        made = self._as_graph(buffers) if self.device.type == "cuda" else self._as_call(buffers)
        self.captured[place] = made
        return made

    def _as_graph(self, buffers: dict[str, Tensor]) -> Captured:
        """Warmed up beside the main stream first: libraries choose and allocate in their first calls."""
        beside = torch.cuda.Stream(self.device)
        beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(beside):
            for _ in range(2):
                self.function(buffers)
        torch.cuda.current_stream(self.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.function(buffers)
        return Captured(buffers=buffers, outputs=outputs, replay=graph.replay)

    def _as_call(self, buffers: dict[str, Tensor]) -> Captured:
        outputs: dict[str, Tensor] = {}
        return Captured(
            buffers=buffers, outputs=outputs, replay=lambda: outputs.update(self.function(buffers))
        )


def _size(dim: Dim, values: Sizes) -> int:
    if isinstance(dim, int):
        return dim
    return values[dim] if isinstance(dim, Symbol) else dim.factor * values[dim.symbol]
