"""Rows of a learned table of positions at places between its cells, mixed inside the graph.

N places, P cells of a square table, C width.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor


def rows_between(table_PC: Tensor, side: int, at_N2: Tensor) -> Tensor:
    """Return each place's share of the four cells round it, in float32; places begin at 0."""
    before_N2 = at_N2.floor()
    part_N2 = at_N2 - before_N2
    taps = ((before_N2, 1.0 - part_N2), ((before_N2 + 1.0).clamp(max=side - 1), part_N2))
    found = torch.zeros(())
    for (down_N2, low_N2), (across_N2, near_N2) in product(taps, taps):
        place_N = down_N2[:, 0] * side + across_N2[:, 1]
        share_N = low_N2[:, 0] * near_N2[:, 1]
        found = found + share_N[:, None] * F.embedding(place_N.long(), table_PC).float()
    return found
