"""Interpolation of a square table of positions: which entries a patch reads, and how much of each.

N patches, A taps along one axis, K = A x A taps of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.errors import UnsupportedError

# Bilinear over as many entries as lie under a patch; a patch reads all of them.
ANTIALIASED = "antialiased"
# Of the cubic kernel, in torch as in every other library but Pillow.
CUBIC = -0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of `side` x `side` positions and how it is stretched over a frame."""

    side: int
    mode: str = "bilinear"
    align_corners: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("bilinear", "bicubic", ANTIALIASED):
            raise UnsupportedError(
                f"a table of positions stretched by '{self.mode}'; bilinear or bicubic expected. Encode with "
                "transformers, or write a recipe (recipes/README.md)."
            )


def taps(table: Table, positions_N2: Tensor, sizes_N2: Tensor) -> Tensor:
    """Return the entries that each patch reads, [N, K]."""
    first_N2, _ = _starts(table, positions_N2, sizes_N2)
    taps_N2A = (first_N2[:, :, None] + _offsets(table)).clamp(0, table.side - 1)
    row_NA, column_NA = taps_N2A.unbind(1)
    found: Tensor = (row_NA[:, :, None] * table.side + column_NA[:, None, :]).flatten(1)
    return found


def weights(table: Table, positions_N2: Tensor, sizes_N2: Tensor) -> Tensor:
    """Return the share of each entry, [N, K] in float32."""
    if table.mode == ANTIALIASED:
        stride_N21 = (table.side / sizes_N2)[:, :, None]
        far_N2A = (torch.arange(table.side) + 0.5 - (positions_N2[:, :, None] + 0.5) * stride_N21).abs()
        share_N2A = (1 - far_N2A / stride_N21.clamp(min=1)).clamp(min=0)
        return _both(share_N2A / share_N2A.sum(-1, keepdim=True))
    first_N2, source_N2 = _starts(table, positions_N2, sizes_N2)
    far_N2A = (source_N2[:, :, None] - first_N2[:, :, None] - _offsets(table)).abs()
    if table.mode == "bilinear":
        share_N2A = (1 - far_N2A).clamp(min=0)
    else:
        near = ((CUBIC + 2) * far_N2A - (CUBIC + 3)) * far_N2A**2 + 1
        far = CUBIC * (((far_N2A - 5) * far_N2A + 8) * far_N2A - 4)
        share_N2A = torch.where(far_N2A <= 1, near, far)
    return _both(share_N2A)


def _both(share_N2A: Tensor) -> Tensor:
    row_NA, column_NA = share_N2A.unbind(1)
    found: Tensor = (row_NA[:, :, None] * column_NA[:, None, :]).flatten(1)
    return found


def _starts(table: Table, positions_N2: Tensor, sizes_N2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry before each place in the table, and the place itself."""
    if table.align_corners:
        source_N2 = positions_N2.float() * (table.side - 1) / (sizes_N2 - 1).clamp(min=1)
    else:
        source_N2 = (positions_N2.float() + 0.5) * table.side / sizes_N2 - 0.5
    return source_N2.floor().long(), source_N2


def _offsets(table: Table) -> Tensor:
    return torch.arange(0, 2) if table.mode == "bilinear" else torch.arange(-1, 3)
