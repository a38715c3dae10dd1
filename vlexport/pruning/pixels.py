"""The rules that choose cells by their bytes, in integers, so that every machine keeps the same.

T frames (of a video pairs), H x W cells of each, C colours, B bytes of a colour in a cell; N = H * W.
Scores are int64 (T, H, W): the higher stays, of equals the one with the lower index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vlexport.pruning.cells import RULES, CellChoice
from vlexport.pruning.selectors import best, ranks

# Cells (T, H, W, C, B) and room for K indices to K indices, ascending, and how many of them count.
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def kept_cells(choice: CellChoice, cells_THWCB: Tensor, run: Choose | None = None) -> Tensor:
    """Return the indices of the cells that stay, ascending.

    run  the compiled form of the rule's `Chooser`
    """
    frames, rows, columns = cells_THWCB.shape[:3]
    num_kept = frames * rows * columns if choice.rate is None else choice.num_kept(frames, rows * columns)
    kept_K, count_1 = (run or Chooser(choice.name))(cells_THWCB, torch.empty(num_kept, dtype=torch.bool))
    return kept_K if choice.rate is not None else kept_K[: int(count_1)]


def kept_among(choice: CellChoice, cells_THWCB: Tensor, present_K: Tensor) -> Tensor:
    """Return the indices of the cells that stay by a rate of all cells, of those that are present."""
    frames, rows, columns = cells_THWCB.shape[:3]
    scores_R = SCORES[choice.name](cells_THWCB).flatten()
    scores_R = torch.full_like(scores_R, -1).index_copy(0, present_K, scores_R[present_K])
    return best(scores_R, min(len(present_K), choice.num_kept(frames, rows * columns)))


class Chooser(torch.nn.Module):
    """`Choose` of one rule, as a module without weights: what is compiled and packaged."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.rule = name, RULES[name]

    def forward(self, cells_THWCB: Tensor, room_K: Tensor) -> tuple[Tensor, Tensor]:
        scores_THW, num_kept = SCORES[self.name](cells_THWCB), room_K.shape[0]
        if not self.rule.is_rated:
            # Those that stay first, and how many these are.
            stays_R = scores_THW.flatten() > 0
            slot_R = torch.where(stays_R, stays_R.to(torch.int64).cumsum(0) - 1, num_kept)
            index_R = torch.arange(stays_R.shape[0], device=stays_R.device)
            return index_R.new_zeros(num_kept + 1).scatter(0, slot_R, index_R)[:num_kept], stays_R.sum()
        if self.rule.by_frame:
            scores_THW = _in_budgets(scores_THW, num_kept, first_frame=self.rule.first_frame)
        kept_K = best(scores_THW.flatten(), num_kept)
        return kept_K, torch.full((), num_kept, device=kept_K.device)


def static(cells_THWCB: Tensor) -> Tensor:
    """Return the distance to what stands still: the cell's median over time, the lower of two."""
    return _distance(cells_THWCB, _lower_median(cells_THWCB))


def delta(cells_THWCB: Tensor) -> Tensor:
    """Return the distance to the frame before; of the first one to itself."""
    return _distance(cells_THWCB, _shifted(cells_THWCB, 0))


def contrast(cells_THWCB: Tensor) -> Tensor:
    """Return the distance of the bytes of a cell to their mean, colour by colour, times B."""
    whole_THWCB = cells_THWCB.to(torch.int32)
    sum_THWC1 = whole_THWCB.sum(-1, keepdim=True, dtype=torch.int32)
    apart_THWCB = (whole_THWCB * cells_THWCB.shape[-1] - sum_THWC1).abs()
    return apart_THWCB.sum((-2, -1), dtype=torch.int64)


def predicted(cells_THWCB: Tensor) -> Tensor:
    """Return 0 for cells that are, byte for byte, a neighbour that stands for them, or the cell before.

    The left neighbour does, but the upper one where the left one equals the one above it, and in the first
    column.
    """
    left_THW = _same_as_before(cells_THWCB, 2)
    above_THW = _same_as_before(cells_THWCB, 1)
    # Where the upper left cell is as the upper one too, both neighbours are the same.
    by_above_THW = _before(above_THW, 2)
    by_above_THW = by_above_THW | (torch.arange(cells_THWCB.shape[2], device=cells_THWCB.device) == 0)
    # ONNX Runtime chooses between no flags.
    like_THW = (by_above_THW & above_THW) | (~by_above_THW & left_THW)
    return (~(like_THW | _same_as_before(cells_THWCB, 0))).to(torch.int64)


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "static": static,
    "static-frames": static,
    "delta": delta,
    "delta-frames": delta,
    "contrast": contrast,
    "predicted": predicted,
}


def _distance(cells_THWCB: Tensor, others: Tensor) -> Tensor:
    # In other types of integers compiled loops take ten times as long.
    apart = (cells_THWCB.to(torch.int32) - others.to(torch.int32)).abs()
    distance_THW: Tensor = apart.sum((-2, -1), dtype=torch.int64)
    return distance_THW


def _lower_median(cells_THWCB: Tensor) -> Tensor:
    """Return the median over time bit by bit: the largest byte that at most so many others are below.

    torch's own takes five times as long once this is compiled, and ONNX has none for bytes.
    """
    below, values_THWCB = (cells_THWCB.shape[0] - 1) // 2, cells_THWCB.to(torch.int32)
    median_HWCB = torch.zeros_like(values_THWCB[0])
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        larger_HWCB = median_HWCB + bit
        num_below_HWCB = (values_THWCB < larger_HWCB).to(torch.int32).sum(0, dtype=torch.int32)
        median_HWCB = torch.where(num_below_HWCB <= below, larger_HWCB, median_HWCB)
    return median_HWCB


def _same_as_before(cells_THWCB: Tensor, axis: int) -> Tensor:
    """Return whether each cell equals the one before it along an axis; the first of an axis has none."""
    is_same_THW = _distance(cells_THWCB, _shifted(cells_THWCB, axis)) == 0
    return is_same_THW & _has_before(cells_THWCB, axis)


def _before(flags_THW: Tensor, axis: int) -> Tensor:
    """Return the flag of the cell before each one along an axis, False for the first."""
    return _shifted(flags_THW, axis) & _has_before(flags_THW, axis)


def _shifted(values: Tensor, axis: int) -> Tensor:
    """Return what is before each place along an axis; the first stays. Slices would forbid sizes of 1."""
    place = torch.arange(values.shape[axis], device=values.device)
    return values.index_select(axis, (place - 1).clamp_min(0))


def _has_before(values: Tensor, axis: int) -> Tensor:
    place = torch.arange(values.shape[axis], device=values.device)
    return (place > 0).view([-1 if at == axis else 1 for at in range(3)])


def _in_budgets(scores_THW: Tensor, num_kept: int, *, first_frame: bool) -> Tensor:
    """Return 1 for the best cells of each frame: as many of each, the rest of those with the largest sums.

    first_frame  all of the first one, whatever their scores are
    """
    frames, rows, columns = scores_THW.shape
    place_T, num_first = torch.arange(frames, device=scores_THW.device), int(first_frame)
    is_whole_T = place_T < num_first
    left = num_kept - num_first * rows * columns
    share, rest = left // torch.sym_max(frames - num_first, 1), left % torch.sym_max(frames - num_first, 1)
    sum_T = torch.where(is_whole_T, -1, scores_THW.sum((1, 2)))
    budget_T = torch.where(is_whole_T, rows * columns, share + (ranks(sum_T[None])[0] < rest).to(torch.int64))
    is_kept_TN = ranks(scores_THW.flatten(1)) < budget_T[:, None]
    budgeted_THW: Tensor = is_kept_TN.to(torch.int64).unflatten(1, (rows, columns))
    return budgeted_THW
