"""The same attention for runtimes without loops: windows packed into fixed rows, frames on shelves.

A window row has as many slots as a whole window; small windows share one and keep apart by their
segment number. Frames stand on shelves.

M merged cells, W window rows, S = W x cells of a row (cell slots), U patches in a cell, P = S x U rows of
the tower, L patches of a window row, H heads, D head width.
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
from vlexport.vision.shelves import SHELVES, ShelfNames, Shelves, shelve, shelves_in

TOKENS = Symbol("tokens")
WINDOW_ROWS = Symbol("window_rows")
FRAMES = ShelfNames("frame", "frames", "cells")


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
    frames = shelve(FRAMES.segment, grid.frames(grids_I3, merge), slot_M, len(order_S), unit)
    tables = {
        "positions": grid.patch_positions(grids_I3, merge),
        "order": order_S,
        "inverse": slot_M,
        "window_segments": torch.repeat_interleave(segment_S, unit).view(rows, capacity * unit),
        **frames.tables,
        "frame_places": frames.places_S,
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
        **FRAMES.axes(),
    }


def row_ranges(tokens: Range, frames: Range, largest: int, capacity: int) -> dict[Symbol, Range]:
    """Ranges of this form's symbols for so many tokens and frames; `largest` is the most cells of a frame."""
    # Best fit leaves at most one row half empty or less.
    most = 2 * -(-tokens.max // capacity)
    rows = Range(1, min(most, max(1, tokens.opt // capacity)), most)
    usual = min(largest, max(1, tokens.opt // frames.opt))
    return {WINDOW_ROWS: rows, **FRAMES.ranges(frames, Range(1, usual, largest))}


def padded_score_counts(tables: Mapping[str, Tensor]) -> dict[str, int]:
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

    shelves: Shelves
    cos_NK: Tensor
    sin_NK: Tensor
    order_M: None = None
    inverse_M: None = None

    def attend(self, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, scale: float) -> Tensor:
        return self.shelves.attend(q_PHD, k_PHD, v_PHD, scale)


def shelves_of(inputs: Mapping[str, Tensor], unit: int, cos_NK: Tensor, sin_NK: Tensor) -> FrameShelves:
    """The shelves of a call, from its inputs."""
    shelves = Shelves(shelves_in(inputs, FRAMES.segment), inputs["frame_places"], unit)
    return FrameShelves(shelves, cos_NK, sin_NK)
