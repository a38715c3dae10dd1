"""Video frames in a prompt that writes time as text: `timestamp, start, video tokens, end` for each.

F tokens per frame, L tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionRule, merged_sides


def frame_blocks(
    ids: Sequence[int], item: PlacedMedia, rule: PositionRule, *, pruned: bool
) -> list[tuple[int, Tensor]]:
    """First column and (4, L) block of each frame that has tokens, before any kept token is known.

    Channel 3 is how far the text after the frame advances. A frame that holds more tokens than a grid has
    cells (all kept tokens of a pruned video lumped together) is laid out as grids one after another.
    """
    assert rule.markers is not None
    rows, columns = merged_sides(item.grid, rule.merge)
    frames = _find_frames(ids, item, rule.markers)
    if not pruned and any(count != rows * columns for _, count in frames):
        raise InputError(
            f"video at {item.offset}: its frames hold {[count for _, count in frames]} tokens in the prompt, "
            f"the grid {item.grid} has {rows * columns} per frame. Expand the prompt by the grid, or say "
            f"that the prompt is pruned."
        )
    return [(first, _grids_in_a_row(count, rows, columns)) for first, count in frames if count]


def _find_frames(ids: Sequence[int], item: PlacedMedia, markers: FrameMarkers) -> list[tuple[int, int]]:
    """First video token and number of video tokens of each frame inside the placeholder."""
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
