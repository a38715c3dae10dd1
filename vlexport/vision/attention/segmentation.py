"""Segmentations: how the rows of a call are cut into segments that attend inside themselves.

A cell is what segments consist of: `unit` neighbouring rows (patches). Host side, integers only.
M cells of a call, S segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.specs import Range, Symbol


@dataclass(frozen=True, kw_only=True, slots=True)
class Segmentation:
    """A named way to cut the rows of a call; attention does not leave a segment.

    The first segmentation of a family orders the rows of its blocks.

    name     beginning of the names of its tables and sizes
    within   the first segmentation, where segments of that one consist of whole segments of this one; any
             other segmentation needs an order of its own
    largest  most cells of a segment, where media do not change it; several segments then share a padded row
    queries  rows that attend to each segment, the same for all; 0 where its own rows do
    """

    name: str
    within: str | None = None
    largest: int | None = None
    queries: int = 0

    @property
    def count(self) -> Symbol:
        return Symbol(f"{self.name}s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """An order of cells in which segments are contiguous.

    `order_M[i]` is the cell at place i, counted as they came; `lengths_S` counts the cells of each segment.
    """

    order_M: Tensor
    lengths_S: Tensor

    def of_cells(self, kept_K: Tensor) -> Segments:
        """Return what is left of the segments where these cells stay, counted anew; empty ones are gone."""
        number_M = torch.full_like(self.order_M, -1).index_copy(0, kept_K, torch.arange(kept_K.shape[0]))
        number_M = number_M[self.order_M]
        owner_M = torch.repeat_interleave(self.lengths_S)
        lengths_S = owner_M[number_M >= 0].bincount()
        return Segments(order_M=number_M[number_M >= 0], lengths_S=lengths_S[lengths_S > 0])


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSizes:
    """The segments that calls of a profile have: their number, their cells, and runs of equal ones."""

    count: Range
    length: Range
    runs: Range


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSizes:
    """Sizes of the calls of a profile: cells in all, and the segments of each segmentation."""

    cells: Range
    segments: Mapping[str, SegmentSizes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One segmentation of a call whose cells have been given slots.

    slot_M     slot of the cell at each place; segments are contiguous in places
    lengths_S  cells of each segment, in this order
    rank_S     where each segment went, counted as they came
    in_order   whether places are the slots themselves
    """

    slot_M: Tensor
    lengths_S: Tensor
    rank_S: Tensor
    in_order: bool


def in_order(
    segmentations: Sequence[Segmentation], segments: Mapping[str, Segments], *, by_length: bool
) -> tuple[Tensor, list[Cut]]:
    """Return the order of cells of the first segmentation, and all segmentations in it.

    Segments stay as they came, or equal ones come side by side: sorted `by_length`, then by the
    lengths of their parts.
    """
    first, *others = segmentations
    outer = segments[first.name]
    taken_S = torch.arange(outer.lengths_S.shape[0])
    if by_length:
        taken_S = _sorted(outer, [segments[kind.name] for kind in others if kind.within == first.name])
    order_M, lengths_S = _taken(outer, taken_S)
    rank_S, slot_M, places_M = inverse(taken_S), inverse(order_M), torch.arange(order_M.shape[0])
    cuts = [Cut(slot_M=places_M, lengths_S=lengths_S, rank_S=rank_S, in_order=True)]
    for kind in others:
        inner = segments[kind.name]
        if kind.within == first.name:
            moved_S = rank_S[_owners(outer, inner)].argsort(stable=True)
            lengths_S = inner.lengths_S[moved_S]
            cuts.append(Cut(slot_M=places_M, lengths_S=lengths_S, rank_S=inverse(moved_S), in_order=True))
        else:
            cuts.append(crosswise(inner, slot_M, by_length=by_length))
    return order_M, cuts


def crosswise(segments: Segments, slot_M: Tensor, *, by_length: bool) -> Cut:
    """Return segments whose cells are apart in the slots of a call."""
    taken_S = _sorted(segments, []) if by_length else torch.arange(segments.lengths_S.shape[0])
    order_M, lengths_S = _taken(segments, taken_S)
    return Cut(slot_M=slot_M[order_M], lengths_S=lengths_S, rank_S=inverse(taken_S), in_order=False)


def _sorted(segments: Segments, nested: Sequence[Segments]) -> Tensor:
    """Sort by length, then by the lengths of the parts; equal segments keep their order."""
    if not nested:
        return segments.lengths_S.argsort(stable=True)
    columns = [segments.lengths_S[:, None]]
    for inner in nested:
        owner_P = _owners(segments, inner)
        count_S = owner_P.bincount()
        place_P = torch.arange(owner_P.shape[0]) - (count_S.cumsum(0) - count_S)[owner_P]
        most: int = count_S.max().item()  # type: ignore[assignment]  # a symbol where this is traced
        parts_SP = torch.zeros(count_S.shape[0], most, dtype=torch.int64)
        parts_SP[owner_P, place_P] = inner.lengths_S
        columns.append(parts_SP)
    # Rows in the order of their first entry that differs; of equal ones all have the same number.
    number_S: Tensor = torch.cat(columns, 1).unique(dim=0, return_inverse=True)[1]
    return number_S.argsort(stable=True)


def _taken(segments: Segments, taken_S: Tensor) -> tuple[Tensor, Tensor]:
    lengths_S = segments.lengths_S[taken_S]
    starts_S = (segments.lengths_S.cumsum(0) - segments.lengths_S)[taken_S]
    shift_S = starts_S - (lengths_S.cumsum(0) - lengths_S)
    shift_M = torch.repeat_interleave(shift_S, lengths_S)
    return segments.order_M[torch.arange(shift_M.shape[0]) + shift_M], lengths_S


def _owners(outer: Segments, inner: Segments) -> Tensor:
    owner_M = torch.repeat_interleave(outer.lengths_S)
    return owner_M[inner.lengths_S.cumsum(0) - 1]


def inverse(order_M: Tensor) -> Tensor:
    """Return the permutation that undoes `order_M`."""
    undo_M = torch.empty_like(order_M)
    undo_M[order_M] = torch.arange(order_M.shape[0], dtype=order_M.dtype)
    return undo_M


def take_cells(x_NC: Tensor, order_M: Tensor | None, unit: int, cells: int | None = None) -> Tensor:
    """Take rows of whole cells in another order; without an order, return the same tensor.

    `cells` is how many there are to take from, if not as many as are taken. Sizes are explicit because
    torch.export takes inferred ones for other than 1.
    """
    if order_M is None:
        return x_NC
    width, taken = x_NC.shape[-1], order_M.shape[0]
    cells_MC = x_NC.reshape(taken if cells is None else cells, unit * width)
    taken_NC: Tensor = cells_MC.index_select(0, order_M).reshape(taken * unit, width)
    return taken_NC
