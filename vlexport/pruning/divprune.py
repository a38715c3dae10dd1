"""DivPrune: keep the tokens that are farthest from each other, in exact integers (arXiv 2503.02175).

First the row whose nearest other row is farthest, then again and again the row farthest from all that are
chosen; of equals the one with the lower index. It goes on in blocks of up to 1,024 rows of a frame, each with
its share of the tokens, so memory is linear in the frames.
With the question at hand, the distance of a row counts up to 1.65 times, by how much it is like the question.
T frames, N tokens per frame, R = T * N rows, D width, K kept tokens; B blocks of M rows each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.pruning.selectors import C, Selector
from vlexport.pruning.snapped import STEPS, snapped_distances, snapped_likeness

MOST_ROWS = 1024
# Above every distance, which is at most 2.
FAR = 4.0
# exp(r / 2) for r of 0 to 1 in 1,024 steps, in whole steps: a product with a distance is exact in float32.
WEIGHTS = tuple(round(math.exp(step / STEPS / 2) * STEPS) for step in range(STEPS + 1))

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DivPruneSelector(Selector):
    """Scores of 1 for the rows that are chosen; `plain_ops` as for EVS.

    asks      whether the question counts
    question  its embedding [D], where it is at hand
    """

    plain_ops: bool = False
    asks: bool = False
    question: Tensor | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return "relevance" if self.asks else "divprune"

    @property
    def sums_are_exact(self) -> bool:
        return True

    kinds: ClassVar[tuple[str, ...]] = ("image", "video")
    most_packaged: ClassVar[int | None] = MOST_ROWS
    by_place: ClassVar[bool] = False

    def least_kept(self, tokens_per_frame: C, frames: C) -> int:
        return 1

    def scores(self, embeds_TND: Tensor, share: Tensor, num_kept: int = 0) -> Tensor:
        frames, num_tokens = embeds_TND.shape[:2]
        weight_TN = _weights(embeds_TND, self.question)
        if num_tokens <= MOST_ROWS:
            ends_T = torch.arange(1, frames + 1, device=embeds_TND.device) * num_tokens
            quota_T = _quotas(ends_T, num_kept)
            distance_TNN = snapped_distances(embeds_TND, self.plain_ops)
            is_row_TN = torch.ones_like(distance_TNN[..., 0], dtype=torch.bool)
            return _farthest(distance_TNN, is_row_TN, quota_T, weight_TN).float()
        parts = -(-num_tokens // MOST_ROWS)
        size = -(-num_tokens // parts)
        padded = F.pad(embeds_TND, (0, 0, 0, parts * size - num_tokens))
        rows_BMD = padded.unflatten(1, (parts, size)).flatten(0, 1)
        if weight_TN is not None:
            weight_TN = F.pad(weight_TN, (0, parts * size - num_tokens)).view(-1, size)
        is_row_BM = torch.arange(parts * size, device=embeds_TND.device) < num_tokens
        is_row_BM = is_row_BM.view(parts, size).repeat(frames, 1)
        quota_B = _quotas(is_row_BM.sum(1).cumsum(0), num_kept)
        chosen_BM = _farthest(snapped_distances(rows_BMD, self.plain_ops), is_row_BM, quota_B, weight_TN)
        return chosen_BM.view(frames, parts * size)[:, :num_tokens].float()

    def portable(self) -> Selector:
        return replace(self, plain_ops=True)


def _weights(embeds_TND: Tensor, question_D: Tensor | None) -> Tensor | None:
    """Return how much the distance of each row counts [T, N], by its likeness to the question."""
    if question_D is None:
        return None
    # Levels of a tower follow its embeddings in a row, and words have none.
    rows_RD = embeds_TND.flatten(0, 1)[:, : len(question_D)]
    likeness_R = snapped_likeness(rows_RD, question_D)
    least, most = likeness_R.amin(), likeness_R.amax()
    share_R = (likeness_R - least) * STEPS // (most - least).clamp_min(1)
    weights = torch.tensor(WEIGHTS, dtype=torch.float32, device=embeds_TND.device)
    return weights[share_R].view(embeds_TND.shape[:2])


def _quotas(ends_B: Tensor, num_kept: int) -> Tensor:
    """Return how many rows of each block stay, by where blocks end; their sums are cut to whole ones."""
    kept_B = num_kept * ends_B // ends_B[-1]
    return kept_B - F.pad(kept_B[:-1], (1, 0))


def _farthest(
    distance_BMM: Tensor, is_row_BM: Tensor, quota_B: Tensor, weight_BM: Tensor | None = None
) -> Tensor:
    """Return which rows are chosen: so many of each block, one after the other."""
    own_MM = torch.eye(is_row_BM.shape[1], dtype=torch.bool, device=distance_BMM.device)
    others_BMM = torch.where(own_MM | ~is_row_BM[:, None], FAR, distance_BMM)

    def chosen_with(nearest_BM: Tensor, chosen_BM: Tensor, step: Tensor) -> Tensor:
        weighed_BM = nearest_BM if weight_BM is None else nearest_BM * weight_BM
        open_BM = torch.where(is_row_BM & ~chosen_BM, weighed_BM, -1.0)
        return torch.zeros_like(chosen_BM).scatter(1, open_BM.argmax(1, keepdim=True), True) & (
            step < quota_B
        ).unsqueeze(1)

    def going_on(step: Tensor, _nearest: Tensor, _chosen: Tensor) -> Tensor:
        return step < quota_B.amax(0)

    def one_more(step: Tensor, nearest_BM: Tensor, chosen_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new_BM = chosen_with(nearest_BM, chosen_BM, step)
        nearest_BM = torch.minimum(nearest_BM, _from_row(distance_BMM, new_BM))
        return step + 1, nearest_BM, chosen_BM | new_BM

    step, nearest_BM = quota_B.new_zeros(()), others_BMM.amin(2)
    first_BM = chosen_with(nearest_BM, torch.zeros_like(is_row_BM), step)
    return _loop(going_on, one_more, (step + 1, _from_row(distance_BMM, first_BM), first_BM))[2]


def _from_row(distance_BMM: Tensor, is_one_BM: Tensor) -> Tensor:
    """Return the distances to the one row of each block that is marked, or to the first one."""
    row_B11 = is_one_BM.to(torch.int64).argmax(1)[:, None, None]
    return distance_BMM.gather(1, row_B11.expand(-1, 1, distance_BMM.shape[2]))[:, 0]


def _loop(
    going_on: Callable[[Tensor, Tensor, Tensor], Tensor], one_more: Step, state: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    # The flag is of the process: another thread may trace while this one prunes plain tensors.
    if torch.compiler.is_compiling() and type(state[0]) is not Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        result: tuple[Tensor, Tensor, Tensor] = while_loop(going_on, one_more, state)
        return result
    while going_on(*state):
        state = one_more(*state)
    return state
