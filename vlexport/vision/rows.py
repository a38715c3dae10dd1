"""The same attention for runtimes without loops: windows packed into fixed rows, frames on shelves.

A window row has as many slots as a whole window; small windows share one and keep apart by their
segment number. A frame has a row to itself on the shelf for its size; a shelf is as long as its longest
frame, and keys beyond a frame's length are not seen. Nothing is patches x patches but the scores
themselves, which the runtime's fused attention never stores.

M merged cells, W window rows, S = W x cells of a row (cell slots), U patches in a cell, P = S x U rows of
the tower, F frames on a shelf, L patches of a shelf's rows, H heads, D head width, C width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.specs import Dim, Range, Symbol
from vlexport.vision import grid
from vlexport.vision.grid import Segments

TOKENS = Symbol("tokens")
WINDOW_ROWS = Symbol("window_rows")
# Three lengths keep padded work within a fifth of the ideal on mixes of pages, photos and icons.
SHELVES = ("a", "b", "c")
FRAMES = {shelf: Symbol(f"frames_{shelf}") for shelf in SHELVES}
CELLS = {shelf: Symbol(f"cells_{shelf}") for shelf in SHELVES}


def row_tables(grids_I3: Tensor, merge: int, window_side: int) -> dict[str, Tensor]:
    """The integer inputs of a call, int32, from the grids alone."""
    unit, capacity = merge**2, window_side**2
    windows = grid.windows(grids_I3, merge, window_side)
    slot_M, rows = _packed(windows, capacity)
    order_S = torch.zeros(rows * capacity, dtype=torch.int64)
    order_S[slot_M] = torch.arange(len(slot_M))
    segment_S = torch.full((rows * capacity,), -1)
    window_M = torch.empty_like(slot_M)
    window_M[windows.order_M] = torch.repeat_interleave(
        torch.arange(len(windows.lengths_S)), windows.lengths_S
    )
    segment_S[slot_M] = window_M
    tables = {
        "positions": grid.patch_positions(grids_I3, merge),
        "order": order_S,
        "inverse": slot_M,
        "window_segments": torch.repeat_interleave(segment_S, unit).view(rows, capacity * unit),
        **_shelves(grid.frames(grids_I3, merge), slot_M, len(order_S), unit),
    }
    return {name: table.to(torch.int32) for name, table in tables.items()}


def _packed(windows: Segments, capacity: int) -> tuple[Tensor, int]:
    """The slot of every cell, and the number of rows: best fit, longest windows first."""
    lengths = windows.lengths_S.tolist()
    free: dict[int, list[int]] = {}
    starts, rows = [0] * len(lengths), 0
    for window in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[window]
        room = next((size for size in range(length, capacity) if free.get(size)), None)
        if room is None:
            row, room, rows = rows, capacity, rows + 1
        else:
            row = free[room].pop()
        starts[window] = row * capacity + capacity - room
        if room > length:
            free.setdefault(room - length, []).append(row)
    within = torch.arange(int(windows.lengths_S.sum())) - torch.repeat_interleave(
        windows.lengths_S.cumsum(0) - windows.lengths_S, windows.lengths_S
    )
    slot_M = torch.empty(len(within), dtype=torch.int64)
    slot_M[windows.order_M] = torch.repeat_interleave(torch.tensor(starts), windows.lengths_S) + within
    return slot_M, rows


def _shelves(frames: Segments, slot_M: Tensor, slots: int, unit: int) -> dict[str, Tensor]:
    """Per shelf: which cell slot each place takes, and how many patches of each row are real."""
    lengths = frames.lengths_S
    shelf_F = _cut(lengths)
    starts = lengths.cumsum(0) - lengths
    tables: dict[str, Tensor] = {}
    place_S = torch.zeros(slots, dtype=torch.int64)
    base = 0
    for number, shelf in enumerate(SHELVES):
        chosen = (shelf_F == number).nonzero()[:, 0]
        longest = int(lengths[chosen].max()) if len(chosen) else 1
        cells = torch.zeros(max(1, len(chosen)), longest, dtype=torch.int64)
        counts = torch.ones(max(1, len(chosen)), dtype=torch.int64)
        for row, frame in enumerate(chosen.tolist()):
            length = int(lengths[frame])
            taken = slot_M[frames.order_M[int(starts[frame]) : int(starts[frame]) + length]]
            cells[row, :length] = taken
            counts[row] = length * unit
            place_S[taken] = base + row * longest + torch.arange(length)
        tables[f"frame_cells_{shelf}"] = cells
        tables[f"frame_counts_{shelf}"] = counts
        base += cells.numel()
    return {**tables, "frame_places": place_S}


def _cut(lengths_F: Tensor) -> Tensor:
    """A shelf for every frame: the two cuts between distinct lengths that waste the least work."""
    distinct, counts = lengths_F.unique(return_counts=True)
    sizes, numbers = distinct.tolist(), counts.tolist()
    frames_before = [0]
    for number in numbers:
        frames_before.append(frames_before[-1] + number)

    def work(start: int, stop: int) -> int:
        return (frames_before[stop] - frames_before[start]) * sizes[stop - 1] ** 2 if stop > start else 0

    end = len(sizes)
    # More distinct lengths than this are thinned evenly; the cut moves by a few percent at most.
    steps = sorted({round(index * end / min(end, 64)) for index in range(min(end, 64) + 1)})
    cuts = [(low, high) for low in steps for high in steps if low <= high]
    low, high = min(cuts, key=lambda cut: work(0, cut[0]) + work(cut[0], cut[1]) + work(cut[1], end))
    rank_F = torch.searchsorted(distinct, lengths_F)
    return 2 - (rank_F >= low).long() - (rank_F >= high).long()


def row_axes(merge: int, window_side: int) -> Mapping[str, Mapping[int, Dim]]:
    """Which axes of patches, tables and `embeds` vary, and how they hang together."""
    slots = window_side**2 * WINDOW_ROWS
    return {
        "patches": {0: merge**2 * TOKENS},
        "positions": {0: merge**2 * TOKENS},
        "inverse": {0: TOKENS},
        "embeds": {0: TOKENS},
        "order": {0: slots},
        "frame_places": {0: slots},
        "window_segments": {0: WINDOW_ROWS},
        **{f"frame_cells_{shelf}": {0: FRAMES[shelf], 1: CELLS[shelf]} for shelf in SHELVES},
        **{f"frame_counts_{shelf}": {0: FRAMES[shelf]} for shelf in SHELVES},
    }


def row_ranges(tokens: Range, frames: Range, largest: int, capacity: int) -> dict[Symbol, Range]:
    """Ranges of this form's symbols for so many tokens and frames; `largest` is the most cells of a frame."""
    # Best fit leaves at most one row half empty or less.
    most = 2 * -(-tokens.max // capacity)
    rows = Range(1, min(most, max(1, tokens.opt // capacity)), most)
    shelf = {FRAMES[shelf]: frames if shelf == "a" else Range(1, 1, frames.max) for shelf in SHELVES}
    usual = min(largest, max(1, tokens.opt // frames.opt))
    length = {CELLS[shelf]: Range(1, usual if shelf == "a" else 1, largest) for shelf in SHELVES}
    return {WINDOW_ROWS: rows, **shelf, **length}


def score_counts(tables: Mapping[str, Tensor]) -> dict[str, int]:
    """Score entries per head that an engine computes: of one windowed and one full block."""
    rows, slots = tables["window_segments"].shape
    unit = slots * rows // len(tables["order"])
    full = sum(
        frames * (cells * unit) ** 2
        for frames, cells in (tuple(tables[f"frame_cells_{shelf}"].shape) for shelf in SHELVES)
    )
    return {"window": rows * slots**2, "full": full}


class WindowRows(NamedTuple):
    """Attention inside the windows of a row; empty slots share number -1 and see only each other."""

    segments_WL: Tensor
    cos_NK: Tensor
    sin_NK: Tensor
    order_M: None = None
    inverse_M: None = None

    def attend(self, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, scale: float) -> Tensor:
        rows, length = self.segments_WL.shape
        q, k, v = (x.reshape(rows, length, *x.shape[1:]).transpose(1, 2) for x in (q_PHD, k_PHD, v_PHD))
        same = self.segments_WL[:, None, :, None] == self.segments_WL[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=same, scale=scale)
        return mixed.transpose(1, 2).flatten(0, 1)


class FrameShelves(NamedTuple):
    """Attention inside whole frames, one frame a row, shelf by shelf."""

    cells: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    places_S: Tensor
    unit: int
    cos_NK: Tensor
    sin_NK: Tensor
    order_M: None = None
    inverse_M: None = None

    def attend(self, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, scale: float) -> Tensor:
        mixed = [
            self._shelf(cells_FL, count_F, (q_PHD, k_PHD, v_PHD), scale)
            for cells_FL, count_F in zip(self.cells, self.counts, strict=True)
        ]
        cells_SC = torch.cat(mixed).index_select(0, self.places_S)
        return cells_SC.reshape(self.places_S.shape[0] * self.unit, *q_PHD.shape[1:])

    def _shelf(self, cells_FL: Tensor, count_F: Tensor, qkv: tuple[Tensor, ...], scale: float) -> Tensor:
        frames, cells = cells_FL.shape
        heads, width = qkv[0].shape[1:]
        length, cell_width = cells * self.unit, self.unit * heads * width
        q, k, v = (
            x.reshape(self.places_S.shape[0], cell_width)
            .index_select(0, cells_FL.reshape(-1))
            .reshape(frames, length, heads, width)
            .transpose(1, 2)
            for x in qkv
        )
        seen = torch.arange(length, device=count_F.device) < count_F[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :], scale=scale)
        return mixed.transpose(1, 2).reshape(frames * cells, cell_width)


def shelves_of(inputs: Mapping[str, Tensor], unit: int, cos_NK: Tensor, sin_NK: Tensor) -> FrameShelves:
    """The shelves of a call, from its inputs."""
    return FrameShelves(
        cells=tuple(inputs[f"frame_cells_{shelf}"] for shelf in SHELVES),
        counts=tuple(inputs[f"frame_counts_{shelf}"] for shelf in SHELVES),
        places_S=inputs["frame_places"],
        unit=unit,
        cos_NK=cos_NK,
        sin_NK=sin_NK,
    )
