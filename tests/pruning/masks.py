"""Kept tokens as masks, and EVS with the tie rule of `snap`."""

import torch
from torch import Tensor

from vlexport.positions.rules import Grid
from vlexport.pruning.evs import EVS, EvsSelector, prune
from vlexport.pruning.selectors import Selection, eager

EVS_SNAP = eager(EvsSelector(ties="snap"))


def retention_mask(
    embeds_RD: Tensor, grid_thw: Grid, merge: int, rate: float | None, selection: Selection = EVS
) -> Tensor:
    """Return a mask, bool (R): true for the tokens that survive."""
    kept_K = prune(embeds_RD, grid_thw, merge, rate, selection).kept
    return torch.zeros(len(embeds_RD), dtype=torch.bool).index_fill(0, kept_K, True)
