"""The structure of a prompt as index tensors, and the tensor programs that write positions with them.

N prompt columns, M items (the first one empty), S block rows (the first one zero), X frame times, C channels.

Which column belongs to which item and how much text lies before it is host data, turned once into index
tensors. What depends on pruning is a few gathers and a running sum over items: `write_positions` and
`write_kept_positions` hold no host synchronisation and compile into one graph for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Columns of one item, and how many of its rows (from its start) are at hand.

    An item with fewer rows than columns counts as unfinished: what follows it does not advance past it.
    """

    offset: int
    length: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionPlan:
    """Index tensors of a prompt's structure.

    columns_3N  text tokens before the column; items finished before it; its row among the blocks, 0 for text
    item_of_S   the item of each row; row 0 belongs to the empty item 0
    last_M      the last row of each item
    """

    columns_3N: Tensor
    item_of_S: Tensor
    last_M: Tensor

    def to(self, device: torch.device) -> PositionPlan:
        """The same plan where the blocks live."""
        return PositionPlan(
            columns_3N=self.columns_3N.to(device, non_blocking=True),
            item_of_S=self.item_of_S.to(device, non_blocking=True),
            last_M=self.last_M.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCells:
    """The kept tokens of all items, and what turns their indices into coordinates.

    kept_S     kept indices of all items after one zero
    shapes_3M  tokens per frame, merged width, and where the item's frame times begin
    times_X    frame times of all items after one zero
    """

    kept_S: Tensor
    shapes_3M: Tensor
    times_X: Tensor


Writer = Callable[[PositionPlan, Tensor, Tensor, bool], Tensor]
KeptWriter = Callable[[PositionPlan, KeptCells, bool], tuple[Tensor, Tensor]]


def plan_positions(spans: Sequence[Span], start: int, stop: int) -> PositionPlan:
    """Plan the columns `start` to `stop`; every span begins at `start` or later, in prompt order."""
    is_text = torch.ones(stop - start, dtype=torch.int64)
    finished = torch.zeros(stop - start, dtype=torch.int64)
    row = torch.zeros(stop - start, dtype=torch.int64)
    num_rows = [0]
    for span in spans:
        first, end = span.offset - start, span.offset + span.length - start
        is_text[first:end] = 0
        if span.num_rows == 0:
            continue
        rows_before = sum(num_rows)
        row[first : first + span.num_rows] = torch.arange(rows_before + 1, rows_before + span.num_rows + 1)
        num_rows.append(span.num_rows)
        if span.num_rows == span.length and end < stop - start:
            finished[end] += 1
    text_before = is_text.cumsum(0) - is_text
    rows_per_item = torch.tensor([1, *num_rows[1:]])
    return PositionPlan(
        columns_3N=torch.stack([text_before, finished.cumsum(0), row]),
        item_of_S=torch.repeat_interleave(rows_per_item),
        last_M=rows_per_item.cumsum(0) - 1,
    )


def write_positions(plan: PositionPlan, rows_CS: Tensor, anchor_1: Tensor, by_width: bool) -> Tensor:
    """Positions (3, N) of planned columns.

    rows_CS   the blocks side by side after one zero column
    anchor_1  next free position at the first column
    by_width  text after an item goes on at its start plus channel 3; else after its largest position
    """
    if by_width:
        advance_M = rows_CS[3].index_select(0, plan.last_M)
    else:
        extent_S = rows_CS[:3].amax(0) + 1
        advance_M = torch.zeros_like(plan.last_M).scatter_reduce(0, plan.item_of_S, extent_S, "amax")
    start_M = anchor_1 + advance_M.cumsum(0) - advance_M[:1]
    text_before_N, finished_N, row_N = plan.columns_3N
    start_N = text_before_N + start_M.index_select(0, finished_N)
    table_3N: Tensor = start_N + rows_CS[:3].index_select(1, row_N)
    return table_3N


def write_kept_positions(plan: PositionPlan, cells: KeptCells, by_width: bool) -> tuple[Tensor, Tensor]:
    """Positions (3, N) and delta of a whole prompt from the kept tokens of each item."""
    per_frame_S, width_S, first_time_S = cells.shapes_3M.index_select(1, plan.item_of_S)
    frame_S = cells.kept_S // per_frame_S
    cell_S = cells.kept_S - frame_S * per_frame_S
    row_S = cell_S // width_S
    time_S = cells.times_X.index_select(0, first_time_S + frame_S)
    rows_4S = torch.stack([time_S, row_S, cell_S - row_S * width_S, width_S])
    anchor_1 = torch.zeros_like(plan.last_M[:1])
    table_3N = write_positions(plan, rows_4S, anchor_1, by_width)
    return table_3N, table_3N.amax() + (1 - table_3N.shape[1])
