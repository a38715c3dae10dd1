"""The tables of a call in each layout, and the call as blocks see it.

A layout is how attention kernels see segmentations: `grouped` (equal segments side by side), `padded` (rows
of a few lengths) or `cu_seqlens` (bounds).   M merged cells, N = unit x M rows, C width, K rotary angles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vlexport.specs import Dim, Range, Symbol
from vlexport.vision.attention import cu_seqlens, grouped, padded
from vlexport.vision.attention.cu_seqlens import BoundedAttention
from vlexport.vision.attention.grouped import GroupedAttention
from vlexport.vision.attention.padded import BucketAttention, PackedRows
from vlexport.vision.attention.segmentation import (
    CallSizes,
    Segmentation,
    Segments,
    crosswise,
    in_order,
    inverse,
    take_cells,
)

LAYOUTS = ("grouped", "padded", "cu_seqlens")


Attention = GroupedAttention | BoundedAttention | BucketAttention | PackedRows


class CrossAttention(Protocol):
    """The same queries for every segment; results are segment by segment in an order of their own."""

    @property
    def num_rows(self) -> int: ...

    def cross_attend(self, q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor: ...


class View(NamedTuple):
    """One segmentation of a call: its attention, and its own order of cells if it is not the call's.

    Of a segmentation with queries, `inverse_M` is the order of results.
    """

    attention: Attention
    order_M: Tensor | None
    inverse_M: Tensor | None
    cos_NK: Tensor | None = None
    sin_NK: Tensor | None = None


class CallLayout(NamedTuple):
    """A call as blocks see it: its inputs, the order of its rows, and all segmentations."""

    inputs: Mapping[str, Tensor]

    order_M: Tensor
    inverse_M: Tensor | None
    unit: int
    views: Mapping[str, View]

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor], segmentations: Sequence[Segmentation], unit: int) -> CallLayout:
        views = {kind.name: _view(kind, inputs, unit) for kind in segmentations}
        return cls(inputs, inputs["order"], inputs.get("inverse"), unit, views)

    def arrange(self, x_NC: Tensor) -> Tensor:
        cells = None if self.inverse_M is None else self.inverse_M.shape[0]
        return take_cells(x_NC, self.order_M, self.unit, cells)

    def restore(self, x_NC: Tensor) -> Tensor:
        if self.inverse_M is not None:
            return take_cells(x_NC, self.inverse_M, self.unit, self.order_M.shape[0])
        cells_MC = x_NC.reshape(self.order_M.shape[0], self.unit * x_NC.shape[-1])
        return torch.zeros_like(cells_MC).index_copy(0, self.order_M.long(), cells_MC).reshape(x_NC.shape)

    def queried(self, name: str) -> CrossAttention:
        attention = self.views[name].attention
        assert not isinstance(attention, PackedRows), f"segments of '{name}' are packed for rows of their own"
        return attention

    def results(self, x_PC: Tensor, name: str, queries: int) -> Tensor:
        return take_cells(x_PC, self.views[name].inverse_M, queries, self.queried(name).num_rows)

    def with_rotary(self, angles_NK: Tensor) -> CallLayout:
        angles_NK = self.arrange(angles_NK)
        cos, sin = angles_NK.cos(), angles_NK.sin()
        views = {
            name: view._replace(
                cos_NK=take_cells(cos, view.order_M, self.unit),
                sin_NK=take_cells(sin, view.order_M, self.unit),
            )
            for name, view in self.views.items()
        }
        return self._replace(views=views)


def _view(kind: Segmentation, inputs: Mapping[str, Tensor], unit: int) -> View:
    attention: Attention
    if f"{kind.name}_runs" in inputs:
        attention = grouped.attention(kind, inputs)
    elif f"{kind.name}_bounds" in inputs:
        attention = cu_seqlens.attention(kind, inputs, unit)
    else:
        attention = padded.attention(kind, inputs, unit)
    return View(attention, inputs.get(f"{kind.name}_order"), inputs.get(f"{kind.name}_inverse"))


def tables(
    layout: str, segmentations: Sequence[Segmentation], segments: Mapping[str, Segments], unit: int
) -> dict[str, Tensor]:
    """Return the integer tables of a call; `order` lists the cell in each slot, as they came."""
    first, *others = segmentations
    packed: dict[str, Tensor] = {}
    if layout == "padded" and first.largest is not None:
        slot_M, numbers = padded.pack(segments[first.name], first.largest)
        order_M = torch.zeros(numbers.numel(), dtype=torch.int64)
        order_M[slot_M] = torch.arange(len(slot_M))
        packed[f"{first.name}_segments"] = numbers.repeat_interleave(unit, dim=-1)
        cuts = [(kind, crosswise(segments[kind.name], slot_M, by_length=False)) for kind in others]
    else:
        # Windows stay as they came where nothing is grouped, as in the calls of other runtimes.
        by_length = layout == "grouped" or first.largest is None
        order_M, in_slots = in_order(segmentations, segments, by_length=by_length)
        slot_M, cuts = inverse(order_M), list(zip(segmentations, in_slots, strict=True))
    tables = {"order": order_M, **packed}
    if not any(kind.queries for kind in segmentations):
        tables["inverse"] = slot_M
    for kind, cut in cuts:
        if layout == "padded":
            tables |= padded.tables(kind, cut, unit, len(order_M))
            continue
        tables |= (grouped if layout == "grouped" else cu_seqlens).tables(kind, cut, unit)
        if kind.queries:
            tables[f"{kind.name}_inverse"] = cut.rank_S
        elif not cut.in_order:
            tables[f"{kind.name}_order"] = cut.slot_M
            tables[f"{kind.name}_inverse"] = inverse(cut.slot_M)
    return tables


def axes(layout: str, segmentations: Sequence[Segmentation], cells: Symbol) -> dict[str, Mapping[int, Dim]]:
    """Return the axes of `tables` that vary."""
    first = segmentations[0]
    rows = layout == "padded" and first.largest is not None
    slots: Dim = first.largest * padded.packed_rows(first) if rows and first.largest else cells
    axes: dict[str, Mapping[int, Dim]] = {"order": {0: slots}, "inverse": {0: cells}}
    for kind in segmentations:
        if rows and kind is first:
            axes[f"{kind.name}_segments"] = {0: padded.packed_rows(kind)}
        elif layout == "padded":
            axes |= padded.axes(kind, slots)
        else:
            axes |= (grouped if layout == "grouped" else cu_seqlens).axes(kind)
            if kind is not first and kind.within != first.name:
                axes |= {f"{kind.name}_order": {0: cells}, f"{kind.name}_inverse": {0: cells}}
        if kind.queries:
            axes[f"{kind.name}_inverse"] = {0: kind.count}
    return axes


def ranges(segmentations: Sequence[Segmentation], cells: Symbol, sizes: CallSizes) -> dict[Symbol, Range]:
    """Return how far the sizes of all layouts vary in calls of these sizes."""
    ranges = {cells: sizes.cells}
    for place, kind in enumerate(segmentations):
        own = sizes.segments[kind.name]
        ranges |= {**grouped.ranges(kind, own), **cu_seqlens.ranges(kind, own)}
        is_packed = place == 0 and kind.largest is not None
        ranges |= padded.packed_ranges(kind, sizes) if is_packed else padded.ranges(kind, own)
        ranges |= {kind.count: own.count} if kind.queries else {}
    return ranges


def scores(
    layout: str, segmentations: Sequence[Segmentation], inputs: Mapping[str, Tensor], unit: int
) -> dict[str, int]:
    """Count, for each segmentation, the score entries per head that one attention of a call computes."""
    if layout == "padded":
        return {kind.name: padded.scores(kind, inputs, unit) for kind in segmentations}
    module = grouped if layout == "grouped" else cu_seqlens
    return {kind.name: module.scores(kind, inputs) for kind in segmentations}
