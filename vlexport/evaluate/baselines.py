"""Selectors that look at no embedding: what any other has to beat at the same number of kept tokens.

They keep as many tokens as EVS and are of use in comparisons alone, so no bundle is built with one: they are
not among `METHODS`.

T frames, N tokens per frame, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlexport.pruning.selectors import C, Selector

# Multiples of the golden ratio are spread over the unit interval more evenly than those of any other number.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline(Selector):
    """A choice by place and seed."""

    seed: int = 0
    name: ClassVar[str]

    @property
    def sums_are_exact(self) -> bool:
        return True

    def least_kept(self, tokens_per_frame: C, frames: C) -> C:
        return tokens_per_frame

    def _random(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


class RandomSelector(Baseline):
    """Scores drawn for each token."""

    name = "random"

    def scores(self, embeds_TND: Tensor, share: Tensor, num_kept: int = 0) -> Tensor:
        drawn_TN = torch.rand(embeds_TND.shape[:2], generator=self._random())
        return drawn_TN.to(embeds_TND.device)


class UniformSelector(Baseline):
    """Tokens at even distances in raster order, through all frames, from a start that the seed gives.

    The scores are multiples of the golden ratio without their whole part: of any number of the best, each is
    one of three distances away from the next, so no column of a frame is preferred at any rate.
    """

    name = "uniform"

    def scores(self, embeds_TND: Tensor, share: Tensor, num_kept: int = 0) -> Tensor:
        frames, num_tokens = embeds_TND.shape[:2]
        start = torch.rand(1, generator=self._random(), dtype=torch.float64)
        spread_R = (torch.arange(frames * num_tokens, dtype=torch.float64) * GOLDEN + start) % 1.0
        return spread_R.float().view(frames, num_tokens).to(embeds_TND.device)


BASELINES: dict[str, Callable[..., Selector]] = {
    kind.name: kind for kind in (RandomSelector, UniformSelector)
}
