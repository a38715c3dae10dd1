"""The structure of a prompt as index tensors, and the tensor programs that write positions with them.

N prompt columns, M items (the first one empty), S block rows (the first one zero), X frame times.

Which column belongs to which item and how much text is before it is host data, turned once into index
tensors. What depends on pruning is a few gathers and a running sum over items: `write_positions` and
`write_kept_positions` hold no host synchronisation and compile into one graph for all sizes. Every tensor
is flat, for a compiler may take a fixed dimension of 3 or 4 for a varying one that happens to have that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PositionPlan(NamedTuple):
    """Index tensors of a prompt's structure.

    text_before_N  text tokens before the column
    finished_N     items complete before the column
    row_N          the column's row among the blocks, 0 for text
    item_of_S      the item of each row; row 0 belongs to the empty item 0
    last_M         the last row of each item
    """

    text_before_N: Tensor
    finished_N: Tensor
    row_N: Tensor
    item_of_S: Tensor
    last_M: Tensor

    def to(self, device: torch.device) -> PositionPlan:
        return PositionPlan(*move_together(self, device))


class BlockRows(NamedTuple):
    """Channels of all blocks side by side, each after one zero."""

    time_S: Tensor
    row_S: Tensor
    column_S: Tensor
    width_S: Tensor


class KeptCells(NamedTuple):
    """The kept tokens of all items, and what turns their indices into coordinates.

    kept_S        kept indices of all items after one zero
    per_frame_M   tokens per frame; width_M merged width; first_time_M where its frame times begin
    times_X       frame times of all items after one zero
    """

    kept_S: Tensor
    per_frame_M: Tensor
    width_M: Tensor
    first_time_M: Tensor
    times_X: Tensor


Writer = Callable[[PositionPlan, BlockRows, Tensor, bool], Tensor]
KeptWriter = Callable[[PositionPlan, KeptCells, bool], tuple[Tensor, Tensor]]


def move_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy flat int64 tensors of the host to `device` at once."""
    if device.type == "cpu":
        return list(tensors)
    # An even length for each keeps every piece aligned to 16 bytes, which compiled code expects.
    sizes = [tensor.shape[0] + tensor.shape[0] % 2 for tensor in tensors]
    joined = torch.zeros(sum(sizes), dtype=torch.int64)
    for tensor, piece in zip(tensors, joined.split(sizes), strict=True):
        piece[: tensor.shape[0]] = tensor
    moved = joined.to(device, non_blocking=True).split(sizes)
    return [piece[: tensor.shape[0]] for tensor, piece in zip(tensors, moved, strict=True)]


def plan_positions(placements: Sequence[tuple[int, int]], num_columns: int) -> PositionPlan:
    """Plan the columns of a prompt with items at these places (offset, length), in prompt order."""
    offset_I, length_I = torch.tensor(placements, dtype=torch.int64).reshape(-1, 2).unbind(-1)
    return plan_columns(offset_I, length_I, num_columns)


def plan_columns(offset_I: Tensor, length_I: Tensor, num_columns: int) -> PositionPlan:
    """Plan so many columns for items of these first columns and lengths; each column of an item has a row."""
    none_N, one_I = offset_I.new_zeros(num_columns + 1), torch.ones_like(offset_I)
    # One more column takes what ends with the last one, and the row of the empty item.
    begun_N = none_N.scatter_add(0, offset_I, one_I)[:num_columns].cumsum(0)
    finished_N = none_N.scatter_add(0, offset_I + length_I, one_I)[:num_columns].cumsum(0)
    is_text_N = 1 - begun_N + finished_N
    rows_M = torch.cat([one_I.new_ones(1), length_I])
    offset_M = torch.cat([offset_I.new_full((1,), num_columns), offset_I])
    past_M, item_of_S = rows_M.cumsum(0), torch.repeat_interleave(rows_M)
    row_S = torch.arange(item_of_S.shape[0])
    column_S = row_S + (offset_M - past_M + rows_M).index_select(0, item_of_S)
    return PositionPlan(
        text_before_N=is_text_N.cumsum(0) - is_text_N,
        finished_N=finished_N,
        row_N=none_N.scatter(0, column_S, row_S)[:num_columns],
        item_of_S=item_of_S,
        last_M=past_M - 1,
    )


def write_positions(plan: PositionPlan, rows: BlockRows, anchor_1: Tensor, by_width: bool) -> Tensor:
    """Return positions (3, N) of planned columns.

    anchor_1  next free position at the first column
    by_width  text after an item goes on at its start plus its width channel; else after its largest position
    """
    if by_width:
        advance_M = rows.width_S.index_select(0, plan.last_M)
    else:
        extent_S = torch.maximum(torch.maximum(rows.time_S, rows.row_S), rows.column_S) + 1
        advance_M = torch.zeros_like(plan.last_M).scatter_reduce(0, plan.item_of_S, extent_S, "amax")
    start_M = anchor_1 + advance_M.cumsum(0) - advance_M[:1]
    start_N = plan.text_before_N + start_M.index_select(0, plan.finished_N)
    axes = (rows.time_S, rows.row_S, rows.column_S)
    return torch.stack([start_N + axis_S.index_select(0, plan.row_N) for axis_S in axes])


def write_kept_positions(plan: PositionPlan, cells: KeptCells, by_width: bool) -> tuple[Tensor, Tensor]:
    """Return positions (3, N) and delta of a whole prompt from the kept tokens of each item."""
    per_frame_S = cells.per_frame_M.index_select(0, plan.item_of_S)
    width_S = cells.width_M.index_select(0, plan.item_of_S)
    first_time_S = cells.first_time_M.index_select(0, plan.item_of_S)
    frame_S = cells.kept_S // per_frame_S
    cell_S = cells.kept_S - frame_S * per_frame_S
    row_S = cell_S // width_S
    rows = BlockRows(
        time_S=cells.times_X.index_select(0, first_time_S + frame_S),
        row_S=row_S,
        column_S=cell_S - row_S * width_S,
        width_S=width_S,
    )
    table_3N = write_positions(plan, rows, torch.zeros_like(plan.last_M[:1]), by_width)
    return table_3N, table_3N.amax() + (1 - table_3N.shape[1])
