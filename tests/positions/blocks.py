"""Positions of one item, and from blocks that are known: the library's steps as recorded calls have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vlexport.positions import media, mrope
from vlexport.positions.plan import write_positions
from vlexport.positions.rules import Grid, PositionOptions, PromptPositions, merged_sides


def media_positions(
    grid: Grid, merge: int, tokens_per_second: float = 1.0, seconds_per_grid: float = 1.0
) -> Tensor:
    """Time, row, column and merged width of every token; the time in float32 unless both factors are ints."""
    times_T = media._scaled_times(range(grid[0]), tokens_per_second * seconds_per_grid)
    return media._channels(times_T, *merged_sides(grid, merge))


def recompute_positions(
    num_columns: int,
    offsets: Sequence[int],
    blocks: Sequence[Tensor],
    options: PositionOptions | None = None,
    *,
    write: Any = write_positions,
) -> PromptPositions:
    """Positions of a pruned prompt from its length, placeholder offsets and one block per item."""
    by_width = mrope.resumes_by_width(blocks[0].shape[0] if blocks else 4, options)
    placed = sorted(zip(offsets, blocks, strict=True), key=lambda pair: pair[0])
    return mrope._write(num_columns, placed, by_width, write)
