"""VidCom2: a budget per frame by how far the frame is from the others, then its least ordinary tokens.

T frames, N tokens per frame, R = T * N rows, D width, E channels kept for comparing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.pruning.selectors import C, Selector

WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)
TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class VidCom2Selector(Selector):
    """Scores by rank, so that the best K are exactly the frames' budgets, filled up or trimmed to K."""

    @property
    def name(self) -> str:
        return "vidcom2"

    def least_kept(self, tokens_per_frame: C, frames: C) -> C:
        return frames

    def scores(self, embeds_TND: Tensor, share: Tensor, num_kept: int = 0) -> Tensor:
        """Return the rank of each token, the least similar highest, those inside a frame's budget first."""
        frames, num_tokens = embeds_TND.shape[:2]
        unit_TND = _steady_channels(embeds_TND.flatten(0, 1).float()).unflatten(0, (frames, num_tokens))
        to_video_TN = _similarity(unit_TND, unit_TND.mean((0, 1), keepdim=True))
        similar_TN = to_video_TN + _similarity(unit_TND, unit_TND.mean(1, keepdim=True))
        budget_T1 = _budgets(-to_video_TN.mean(1), share, num_tokens).unsqueeze(1)
        inside_TN = _ranks(-similar_TN) < budget_T1
        rank_TN = _ranks(-similar_TN.flatten()).view(frames, num_tokens)
        num_rows = frames * num_tokens
        return torch.where(inside_TN, 2 * num_rows - rank_TN, num_rows - rank_TN).float()


def _steady_channels(rows_RD: Tensor) -> Tensor:
    variance_D = rows_RD.var(0, correction=0)
    chosen_E = variance_D.topk(torch.sym_max(1, rows_RD.shape[1] // 2), largest=False).indices
    return F.normalize(rows_RD.index_select(1, chosen_E), dim=-1)


def _similarity(unit_TND: Tensor, centre: Tensor) -> Tensor:
    squared_TN = (unit_TND - centre).square().sum(-1)
    near_TN = torch.zeros_like(squared_TN)
    for width in WIDTHS:
        near_TN = near_TN + torch.exp(squared_TN * (-1.0 / (2.0 * width)))
    return near_TN


def _budgets(score_T: Tensor, share: Tensor, num_tokens: int) -> Tensor:
    """Return tokens that each frame may keep (T, int64): more than its share where it differs."""
    weight_T = torch.softmax((score_T - score_T.amax(0)) / TEMPERATURE, dim=0)
    scale_T = (share * (1.0 + weight_T - weight_T.mean())).clamp_max(1.0)
    return (scale_T * num_tokens).round().clamp(1, num_tokens).to(torch.int64)


def _ranks(values: Tensor) -> Tensor:
    order = values.topk(values.shape[-1]).indices
    places = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    return torch.zeros_like(order).scatter(-1, order, places)
