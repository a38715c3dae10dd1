"""Positions of one item, and from blocks that are known: the library's steps as recorded calls have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vlexport.positions import media, mrope
from vlexport.positions.plan import BlockRows, PositionPlan, write_positions
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
    by_width = all(len(block) == 4 for block in blocks) and (options or PositionOptions()).resumes_by_width
    placed = sorted(zip(offsets, blocks, strict=True), key=lambda pair: pair[0])

    def write_so(plan: PositionPlan, rows: BlockRows, anchor_1: Tensor, _: bool) -> Any:
        return write(plan, rows, anchor_1, by_width)

    return mrope._write(num_columns, [(first, block[:4].long()) for first, block in placed], write_so)
