"""Who attends to whom in a call of slices, in each attention form: as runs, on shelves, by bounds.

N patches in the order of the blocks, G groups, Q queries, R runs, B bounds, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vlexport.specs import Dim, Range, Symbol
from vlexport.vision.bounds import bounded_attention, bounded_cross_attention, bounds_of
from vlexport.vision.grid import Segments
from vlexport.vision.segments import segment_attention, segment_cross_attention
from vlexport.vision.shelves import AskedShelves, ShelfNames, Shelves, shelve, shelves_in
from vlexport.vision.slice_tables import Packed

GROUPS = Symbol("groups")
SLICE_RUNS, GROUP_RUNS = Symbol("slice_runs"), Symbol("group_runs")
SLICE_BOUNDS, GROUP_BOUNDS = Symbol("slice_bounds"), Symbol("group_bounds")
SLICE_SHELVES = ShelfNames("slice", "slices", "slice_patches")
GROUP_SHELVES = ShelfNames("group", "groups", "group_patches")


class Seen(Protocol):
    """Attention inside slices."""

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor: ...


class Asked(Protocol):
    """The same queries for every group of slices; answers lie group by group in an order of its own."""

    @property
    def num_rows(self) -> int: ...

    def ask(self, q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor: ...


class SlicePlaces(NamedTuple):
    """Slices, groups, and whose answer stands where."""

    slices: Seen
    groups: Asked
    answer_G: Tensor


class Counts(NamedTuple):
    """How much calls of a profile hold: patches, slices and groups, patches of a slice and of a group."""

    patches: Range
    slices: Range
    groups: Range
    slice_patches: Range
    group_patches: Range
    slice_runs: Range
    group_runs: Range


class SliceForm(NamedTuple):
    """Its tables for a packed call and so many queries; which axes vary, how far; what reads them."""

    tables: Callable[[Packed, int], dict[str, Tensor]]
    axes: Callable[[], dict[str, Mapping[int, Dim]]]
    ranges: Callable[[Counts], dict[Symbol, Range]]
    places: Callable[[Mapping[str, Tensor]], SlicePlaces]


class SliceRuns(NamedTuple):
    """Equal slices side by side."""

    runs_R2: Tensor

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        mixed_NHD: Tensor = segment_attention(q_NHD, k_NHD, v_NHD, self.runs_R2, scale)
        return mixed_NHD


class KeyRuns(NamedTuple):
    """Runs of (groups, query rows, key rows), and how many groups there are in all."""

    runs_R3: Tensor
    num_rows: int

    def ask(self, q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        q_PHD = repeated(q_QHD, self.num_rows)
        mixed_PHD: Tensor = segment_cross_attention(q_PHD, k_NHD, v_NHD, self.runs_R3, scale)
        return mixed_PHD


class SliceBounds(NamedTuple):
    """Slices between neighbouring bounds; none is longer than the call."""

    bounds_B: Tensor

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        mixed_NHD: Tensor = bounded_attention(q_NHD, k_NHD, v_NHD, self.bounds_B, q_NHD.shape[0], scale)
        return mixed_NHD


class KeyBounds(NamedTuple):
    """Keys of a group between neighbouring bounds, and how many groups there are."""

    bounds_B: Tensor
    num_rows: int

    def ask(self, q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        mixed_PHD: Tensor = bounded_cross_attention(
            q_QHD, k_NHD, v_NHD, self.bounds_B, self.num_rows, scale
        )
        return mixed_PHD


def repeated(q_QHD: Tensor, groups: int) -> Tensor:
    """The queries once for every group."""
    return q_QHD[None].expand(groups, -1, -1, -1).flatten(0, 1)


def _run_tables(packed: Packed, queries: int) -> dict[str, Tensor]:
    count_R, keys_R = packed.group_keys_R2.unbind(-1)
    return {
        "runs": packed.runs_R2,
        "group_runs": torch.stack([count_R, torch.full_like(count_R, queries), keys_R], dim=-1),
        "group_inverse": packed.group_inverse_G,
    }


def _shelf_tables(packed: Packed, queries: int) -> dict[str, Tensor]:  # noqa: ARG001
    place_N = torch.arange(len(packed.order_N))
    slices = shelve(SLICE_SHELVES.segment, _segments(packed.runs_R2), place_N, len(place_N), 1)
    groups = shelve(GROUP_SHELVES.segment, _segments(packed.group_keys_R2), place_N, len(place_N), 1)
    answer_G = groups.rows_F[packed.group_inverse_G]
    return {**slices.tables, "slice_places": slices.places_S, **groups.tables, "group_rows": answer_G}


def _bound_tables(packed: Packed, queries: int) -> dict[str, Tensor]:  # noqa: ARG001
    return {
        "slice_bounds": bounds_of(_segments(packed.runs_R2).lengths_S),
        "group_bounds": bounds_of(_segments(packed.group_keys_R2).lengths_S),
        "group_inverse": packed.group_inverse_G,
    }


def _segments(runs_R2: Tensor) -> Segments:
    """Stretches of rows as they lie."""
    lengths = torch.repeat_interleave(runs_R2[:, 1], runs_R2[:, 0])
    return Segments(order_M=torch.arange(int(lengths.sum())), lengths_S=lengths)


def _shelf_ranges(counts: Counts) -> dict[Symbol, Range]:
    return {
        **SLICE_SHELVES.ranges(counts.slices, counts.slice_patches),
        **GROUP_SHELVES.ranges(counts.groups, counts.group_patches),
    }


def _one_more(counts: Range) -> Range:
    return Range(counts.min + 1, counts.opt + 1, counts.max + 1)


def _shelved(inputs: Mapping[str, Tensor]) -> SlicePlaces:
    slices = shelves_in(inputs, SLICE_SHELVES.segment)
    groups = shelves_in(inputs, GROUP_SHELVES.segment)
    return SlicePlaces(Shelves(slices, inputs["slice_places"], 1), AskedShelves(groups), inputs["group_rows"])


FORMS = {
    "runs": SliceForm(
        tables=_run_tables,
        axes=lambda: {
            "runs": {0: SLICE_RUNS},
            "group_runs": {0: GROUP_RUNS},
            "group_inverse": {0: GROUPS},
        },
        ranges=lambda counts: {SLICE_RUNS: counts.slice_runs, GROUP_RUNS: counts.group_runs},
        places=lambda inputs: SlicePlaces(
            SliceRuns(inputs["runs"]),
            KeyRuns(inputs["group_runs"], inputs["group_inverse"].shape[0]),
            inputs["group_inverse"],
        ),
    ),
    "rows": SliceForm(
        tables=_shelf_tables,
        axes=lambda: {
            **SLICE_SHELVES.axes(),
            **GROUP_SHELVES.axes(),
            "slice_places": {0: Symbol("patches")},
            "group_rows": {0: GROUPS},
        },
        ranges=_shelf_ranges,
        places=_shelved,
    ),
    "bounds": SliceForm(
        tables=_bound_tables,
        axes=lambda: {
            "slice_bounds": {0: SLICE_BOUNDS},
            "group_bounds": {0: GROUP_BOUNDS},
            "group_inverse": {0: GROUPS},
        },
        ranges=lambda counts: {
            SLICE_BOUNDS: _one_more(counts.slices),
            GROUP_BOUNDS: _one_more(counts.groups),
        },
        places=lambda inputs: SlicePlaces(
            SliceBounds(inputs["slice_bounds"]),
            KeyBounds(inputs["group_bounds"], inputs["group_inverse"].shape[0]),
            inputs["group_inverse"],
        ),
    ),
}
