"""Positions inside one media item, counted from its start.

T frames, F tokens per frame, G tokens of the grid (T * F), K kept tokens, L tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionRule, merged_sides


def full_positions(item: PlacedMedia, rule: PositionRule) -> Tensor:
    """Return time, row, column and merged width of every token un-pruned, in raster order: (tokens, 4)."""
    return _channels(unpruned_times(item, rule), *merged_sides(item.grid, rule.merge))


def unpruned_times(item: PlacedMedia, rule: PositionRule) -> Tensor:
    """Return time of each frame when nothing is pruned; float64, from the float32 value of the interval."""
    if item.modality == "image":
        return torch.zeros(1, dtype=torch.int64)
    seconds = 1.0 if item.seconds_per_grid is None else _as_float32(item.seconds_per_grid)
    factor = seconds * rule.tokens_per_second
    return (torch.tensor(item.numbers, dtype=torch.float64) * factor).trunc().to(torch.int64)


def pruned_times(item: PlacedMedia, rule: PositionRule) -> Tensor:
    """Return time of each frame of an item in a pruned prompt."""
    if item.modality == "image":
        return torch.zeros(1, dtype=torch.int64)
    if item.seconds_per_grid is None:
        raise InputError(
            f"video at {item.offset} has no seconds_per_grid, and pruning needs it. "
            f"Pass temporal patch size / sampled frames per second, also with precomputed embeddings."
        )
    if rule.options.pruned_time == "float":
        return unpruned_times(item, rule)
    seconds = _as_float32(item.seconds_per_grid)
    return _scaled_times(item.numbers, rule.tokens_per_second * int(seconds))


def pruned_channels(item: PlacedMedia, rule: PositionRule, kept_K: Tensor) -> Tensor:
    """Return `[time, row, column, merged width]` (4, K) of a pruned item; tokens keep coordinates."""
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


def _scaled_times(numbers: Sequence[int], factor: float) -> Tensor:
    if isinstance(factor, int):
        return torch.tensor(numbers) * factor
    # The reference multiplies an int64 tensor by a Python float, which promotes to float32.
    product_T = torch.tensor(numbers, dtype=torch.float32) * torch.tensor(factor, dtype=torch.float32)
    return product_T.trunc().to(torch.int64)


def _as_float32(seconds: float) -> float:
    # Preprocessing stores the interval as float32; the reference widens that value.
    return float(torch.tensor(seconds, dtype=torch.float32))


def frame_blocks(
    ids: Sequence[int], item: PlacedMedia, rule: PositionRule, *, pruned: bool
) -> list[tuple[int, Tensor]]:
    """Return first column and (4, L) block of each frame that has tokens, before any kept token is known.

    Channel 3 is how far the text after the frame advances. A frame that holds more tokens than a grid has
    cells (all kept tokens of a pruned video lumped together) is laid out as grids one after another.
    """
    assert rule.markers is not None
    rows, columns = merged_sides(item.grid, rule.merge)
    frames = _find_frames(ids, item, rule.markers)
    if not pruned and any(count != rows * columns for _, count in frames):
        raise InputError(
            f"video at {item.offset}: its frames hold {[count for _, count in frames]} tokens in the prompt, "
            f"the grid {item.grid} has {rows * columns} per frame. Expand the prompt by the grid, or mark "
            f"the prompt as pruned."
        )
    return [(first, _grids_in_a_row(count, rows, columns)) for first, count in frames if count]


def _find_frames(ids: Sequence[int], item: PlacedMedia, markers: FrameMarkers) -> list[tuple[int, int]]:
    frames = []
    at = item.offset
    for frame in range(item.grid[0]):
        try:
            start = ids.index(markers.vision_start, at, item.end)
            end = ids.index(markers.vision_end, start + 1, item.end)
        except ValueError:
            raise InputError(
                f"video at {item.offset}: {frame} of {item.grid[0]} frames found between their "
                f"markers in its {item.length} tokens; give every frame both markers inside the placeholder."
            ) from None
        first = next((index for index in range(start, end) if ids[index] == markers.video), end)
        frames.append((first, end - first))
        at = end + 1
    return frames


def _grids_in_a_row(count: int, rows: int, columns: int) -> Tensor:
    index_L = torch.arange(count)
    grid_L = index_L // (rows * columns)
    cell_L = index_L % (rows * columns)
    start_L = grid_L * max(rows, columns)
    block_4L = torch.stack([start_L, start_L + cell_L // columns, start_L + cell_L % columns, start_L])
    block_4L[3] = block_4L[:3].amax() + 1
    return block_4L
