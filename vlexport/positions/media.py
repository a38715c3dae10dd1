"""Positions inside one media item, counted from its start.

T frames, G tokens of the grid (T * rows * columns), K kept tokens, L tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import Grid, PlacedMedia, PositionRule, merged_sides


def media_positions(
    grid_thw: Grid, merge: int, tokens_per_second: float = 1.0, seconds_per_grid: float = 1.0
) -> Tensor:
    """Time, row, column and merged width of every token in raster order: int64 (tokens, 4).

    Time is `trunc(frame * tokens_per_second * seconds_per_grid)`: in integers when both factors are ints,
    in float32 otherwise.
    """
    times_T = _scaled_times(grid_thw[0], tokens_per_second * seconds_per_grid)
    return _channels(times_T, *merged_sides(grid_thw, merge))


def full_positions(item: PlacedMedia, rule: PositionRule) -> Tensor:
    """The same four columns for an item of an un-pruned prompt: int64 (tokens, 4)."""
    return _channels(unpruned_times(item, rule), *merged_sides(item.grid, rule.merge))


def unpruned_times(item: PlacedMedia, rule: PositionRule) -> Tensor:
    """Time of each frame when nothing is pruned; float64, from the float32 value of the interval."""
    if item.modality == "image":
        return torch.zeros(1, dtype=torch.int64)
    seconds = 1.0 if item.seconds_per_grid is None else _as_float32(item.seconds_per_grid)
    return _double_times(item.grid[0], seconds * rule.tokens_per_second)


def pruned_times(item: PlacedMedia, rule: PositionRule) -> Tensor:
    """Time of each frame of an item in a pruned prompt."""
    if item.modality == "image":
        return torch.zeros(1, dtype=torch.int64)
    if item.seconds_per_grid is None:
        raise InputError(
            f"video at {item.offset} has no seconds_per_grid, and pruning needs it. "
            f"Pass temporal patch size / sampled frames per second, also with precomputed embeddings."
        )
    seconds = _as_float32(item.seconds_per_grid)
    if rule.options.pruned_time == "float":
        return _double_times(item.grid[0], seconds * rule.tokens_per_second)
    return _scaled_times(item.grid[0], rule.tokens_per_second * int(seconds))


def pruned_channels(item: PlacedMedia, rule: PositionRule, kept_K: Tensor) -> Tensor:
    """The block of a pruned item, or of an image beside one: `[time, row, column, merged width]`, (4, K).

    A kept token keeps the coordinates of the cell it came from.
    """
    channels_G4 = _channels(pruned_times(item, rule), *merged_sides(item.grid, rule.merge))
    return channels_G4.to(kept_K.device).index_select(0, kept_K).T


def _channels(times_T: Tensor, rows: int, columns: int) -> Tensor:
    frames = times_T.shape[0]
    channels = torch.empty(frames, rows, columns, 4, dtype=torch.int64)
    channels[..., 0] = times_T[:, None, None]
    channels[..., 1] = torch.arange(rows)[:, None]
    channels[..., 2] = torch.arange(columns)
    channels[..., 3] = columns
    return channels.view(-1, 4)


def _scaled_times(frames: int, factor: float) -> Tensor:
    if isinstance(factor, int):
        return torch.arange(frames) * factor
    # The reference multiplies an int64 tensor by a Python float, which promotes to float32.
    product_T = torch.arange(frames, dtype=torch.float32) * torch.tensor(factor, dtype=torch.float32)
    return product_T.trunc().to(torch.int64)


def _double_times(frames: int, factor: float) -> Tensor:
    return (torch.arange(frames, dtype=torch.float64) * factor).trunc().to(torch.int64)


def _as_float32(seconds: float) -> float:
    # Preprocessing stores the interval as float32; the reference widens that value.
    return float(torch.tensor(seconds, dtype=torch.float32))
