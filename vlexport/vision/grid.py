"""Grids of media items: cell order, windows, frames and patch coordinates. Host side, integers only.

I items, M merged cells (tokens) of a call, N patches of a call, W windows, F frames.
A grid row is (T, H, W) in patches; a cell is merge x merge patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.vision.attention.segmentation import Segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """Every merged cell of a call in raster order, one row per cell (all int64, shape M)."""

    frame_M: Tensor
    row_M: Tensor
    column_M: Tensor
    item_M: Tensor


def check_grids(grids_I3: Tensor, merge: int) -> None:
    """Refuse grids that no tower can serve."""
    if grids_I3.ndim != 2 or grids_I3.shape[1] != 3 or grids_I3.dtype.is_floating_point:
        raise InputError(
            f"grids: integers of shape [items, 3] expected, {list(grids_I3.shape)} {grids_I3.dtype} given."
        )
    if grids_I3.numel() == 0:
        raise InputError("no image or video given: at least one is expected.")
    for grid in grids_I3.tolist():
        if min(grid) < 1:
            raise InputError(
                f"grid {grid}: every side must be at least 1 (frames, rows, columns in patches)."
            )
        if grid[1] % merge or grid[2] % merge:
            raise InputError(
                f"grid {grid}: rows and columns must be multiples of the merge size {merge}; "
                f"resize to {[grid[0], -(-grid[1] // merge) * merge, -(-grid[2] // merge) * merge]}."
            )


def cells(grids_I3: Tensor, merge: int) -> Cells:
    """List the merged cells of all items: item, frame, row, column, in that order."""
    rows_I, columns_I = grids_I3[:, 1] // merge, grids_I3[:, 2] // merge
    per_frame_I = rows_I * columns_I
    count_I = grids_I3[:, 0] * per_frame_I
    item_M = torch.repeat_interleave(torch.arange(grids_I3.shape[0]), count_I)
    within_M = torch.arange(item_M.shape[0]) - (count_I.cumsum(0) - count_I)[item_M]
    first_frame_I = grids_I3[:, 0].cumsum(0) - grids_I3[:, 0]
    in_frame_M = within_M % per_frame_I[item_M]
    return Cells(
        frame_M=first_frame_I[item_M] + within_M // per_frame_I[item_M],
        row_M=in_frame_M // columns_I[item_M],
        column_M=in_frame_M % columns_I[item_M],
        item_M=item_M,
    )


def windows(grids_I3: Tensor, merge: int, side: int) -> Segments:
    """Return windows of side x side cells, row by row inside a frame; cells in raster order inside."""
    merged = cells(grids_I3, merge)
    down_I = (grids_I3[:, 1] // merge + side - 1) // side
    across_I = (grids_I3[:, 2] // merge + side - 1) // side
    per_frame_I = down_I * across_I
    first_window_I = (grids_I3[:, 0] * per_frame_I).cumsum(0) - grids_I3[:, 0] * per_frame_I
    first_frame_I = grids_I3[:, 0].cumsum(0) - grids_I3[:, 0]
    item_M = merged.item_M
    window_M = (
        first_window_I[item_M]
        + (merged.frame_M - first_frame_I[item_M]) * per_frame_I[item_M]
        + merged.row_M // side * across_I[item_M]
        + merged.column_M // side
    )
    return Segments(order_M=window_M.argsort(stable=True), lengths_S=window_M.bincount())


def frames(grids_I3: Tensor, merge: int) -> Segments:
    """Return frames in raster order, one segment each."""
    per_frame_I = grids_I3[:, 1] * grids_I3[:, 2] // merge**2
    lengths_F = torch.repeat_interleave(per_frame_I, grids_I3[:, 0])
    return Segments(order_M=torch.arange(lengths_F.sum().item()), lengths_S=lengths_F)


def patch_sides(grids_I3: Tensor, merge: int) -> Tensor:
    """Return rows and columns, in patches, of the frame of every patch, [N, 2]."""
    sides_M2 = grids_I3[:, 1:][cells(grids_I3, merge).item_M]
    return sides_M2[:, None].expand(-1, merge**2, -1).flatten(0, 1)


def patch_positions(grids_I3: Tensor, merge: int) -> Tensor:
    """Return row and column of every patch, [N, 2], cell by cell, in raster order inside a cell."""
    merged = cells(grids_I3, merge)
    inside = torch.arange(merge)
    row_Mmm = (merged.row_M * merge)[:, None, None] + inside[None, :, None]
    column_Mmm = (merged.column_M * merge)[:, None, None] + inside[None, None, :]
    row_Mmm, column_Mmm = torch.broadcast_tensors(row_Mmm, column_Mmm)
    return torch.stack([row_Mmm.flatten(), column_Mmm.flatten()], dim=-1)
