"""Efficient Video Sampling: keep the tokens that differ most from the same place one frame before.

T frames, N tokens per frame, R = T * N rows, C = R - N rows that have a predecessor, D width, K kept rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import Grid
from vlexport.pruning.cells import kept_frame_by_frame
from vlexport.pruning.selectors import C, Pruned, Selection, Selector, eager, prune_by, ranks
from vlexport.pruning.snapped import STEPS, snapped_dissimilarity, stored

# Above every dissimilarity (at most about 2) and exact in every dtype: the first frame always survives.
FIRST_FRAME = 255.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvsSelector(Selector):
    """Scores by dissimilarity to the previous frame.

    ties         "exact": in the arithmetic of the embeddings' own dtype, step by step rounded.
                 "snap": in exact integers, as multiples of 2**-10, so every backend keeps the same tokens
                 even where static scenes make thousands of scores equal up to the last bit.
    by_frame     as many of every later frame, so that what stays of it needs no frame after it; "snap" alone
    plain_ops    without bit casts and strided views, which graph formats lack. Same numbers.
    """

    ties: Literal["exact", "snap"] = "exact"
    by_frame: bool = False
    plain_ops: bool = False

    def __post_init__(self) -> None:
        if self.ties not in ("exact", "snap"):
            raise InputError(f"ties '{self.ties}': expected 'exact' or 'snap'.")

    @property
    def name(self) -> str:
        return "evs-frames" if self.by_frame else "evs" if self.ties == "exact" else "evs-snap"

    def least_kept(self, tokens_per_frame: C, frames: C) -> C:
        return tokens_per_frame

    def retained_count(self, tokens_per_frame: int, frames: int, rate: float) -> int:
        if self.by_frame:
            return kept_frame_by_frame(frames, tokens_per_frame, rate)
        return Selector.retained_count(self, tokens_per_frame, frames, rate)

    @property
    def sums_are_exact(self) -> bool:
        return self.ties == "snap"

    def scores(self, embeds_TND: Tensor, share: Tensor, num_kept: int = 0) -> Tensor:
        """Return dissimilarity (T, N); 1 where it is not a number, as for zero vectors in float16."""
        num_tokens = embeds_TND.shape[1]
        score = dissimilarity if self.ties == "exact" else snapped_dissimilarity
        changed_C = score(embeds_TND.flatten(0, 1), num_tokens, self.plain_ops)
        changed_C = torch.where(changed_C.isnan(), 1.0, changed_C)
        first_N = changed_C.new_full((num_tokens,), FIRST_FRAME)
        scores_TN = torch.cat([first_N, changed_C]).view(embeds_TND.shape[0], num_tokens)
        if not self.by_frame:
            return scores_TN
        budget = (num_kept - num_tokens) // torch.sym_max(embeds_TND.shape[0] - 1, 1)
        is_kept_TN = ranks((scores_TN * STEPS).to(torch.int64)) < budget
        return torch.cat([scores_TN[:1], is_kept_TN[1:].to(scores_TN.dtype)])

    def portable(self) -> Selector:
        return replace(self, plain_ops=True)


EVS = eager(EvsSelector())


def prune(
    embeds_RD: Tensor, grid_thw: Grid, merge: int, rate: float | None, selection: Selection = EVS
) -> Pruned:
    """Return the rows of a video that survive and their indices; without a rate, all, not copied."""
    return prune_by(selection, embeds_RD, grid_thw, merge, rate)


def dissimilarity(embeds_RD: Tensor, num_tokens: int, plain_ops: bool) -> Tensor:
    """Return 1 - cosine similarity to one frame before (C), float32, in steps of the embeddings' dtype."""
    dtype = embeds_RD.dtype
    # In float16 the bound is 0, so a zero vector gives 0 / 0; `scores` settles that.
    norm_R1 = torch.linalg.vector_norm(embeds_RD.float(), dim=-1, keepdim=True).clamp_min(1e-8)
    norm_R1 = _rounded(norm_R1, dtype)
    norm_R1 = norm_R1 if plain_ops else stored(norm_R1)
    num_changed = embeds_RD.shape[0] - num_tokens
    current_CD = _unit(embeds_RD[num_tokens:], norm_R1[num_tokens:])
    previous_CD = _unit(embeds_RD[:num_changed], norm_R1[:num_changed])
    product_CD = _rounded(current_CD * previous_CD, dtype)
    return _rounded(1.0 - _rounded(product_CD.sum(-1), dtype), dtype)


def _unit(rows_CD: Tensor, norm_C1: Tensor) -> Tensor:
    if rows_CD.dtype == torch.bfloat16:
        # Equal to the quotient: 8 bits over 8 bits stay 2**-17 away from every midpoint of bfloat16, and the
        # product is 2**-23 off. A multiplication costs a tenth of a division.
        return _rounded(rows_CD.float() * norm_C1.reciprocal(), rows_CD.dtype)
    return _rounded(rows_CD.float() / norm_C1, rows_CD.dtype)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to float32 values that `dtype` can hold: half precision, the same on every backend."""
    return values.to(dtype).float()
