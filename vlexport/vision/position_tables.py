"""Learned tables of positions at places between their cells: in the graph, or as entries and shares.

In the graph places and sides are integers, so a call has no table of floats and weights are the same in every
runtime. N patches, R rows and S columns of a table, P places in it, C width; A taps along one axis, K = A x A
taps of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.errors import UnsupportedError

# Of the cubic kernel, in torch as in every other library but Pillow.
CUBIC = -0.75
# Bilinear over as many entries as lie under a patch; a patch reads all of them.
ANTIALIASED = "antialiased"


def rows_between(table_PC: Tensor, side: int, at_N2: Tensor) -> Tensor:
    """Return each place's share of the four cells round it, in float32; places begin at 0."""
    before_N2 = at_N2.floor()
    part_N2 = at_N2 - before_N2
    taps = ((before_N2, 1.0 - part_N2), ((before_N2 + 1.0).clamp(max=side - 1), part_N2))
    rows = torch.zeros(())
    for (down_N2, low_N2), (across_N2, near_N2) in product(taps, taps):
        place_N = down_N2[:, 0] * side + across_N2[:, 1]
        share_N = low_N2[:, 0] * near_N2[:, 1]
        rows = rows + share_N[:, None] * F.embedding(place_N.long(), table_PC).float()
    return rows


def resized_rows(table_RSC: Tensor, place_N2: Tensor, sides_N2: Tensor) -> Tensor:
    """Return each patch's row of the table resized to its item, in float32, corners not aligned."""
    columns = table_RSC.shape[1]
    flat_PC = table_RSC.flatten(0, 1).float()
    (row_N4, down_N4), (column_N4, across_N4) = (
        _cubic_taps(place_N2[:, axis], sides_N2[:, axis], table_RSC.shape[axis]) for axis in (0, 1)
    )
    # Sixteen sums of one row each: gathered together they are sixteen times the rows of the call.
    found_NC = flat_PC.new_zeros(())
    for row_N, down_N in zip(row_N4.unbind(1), down_N4.unbind(1), strict=True):
        for column_N, across_N in zip(column_N4.unbind(1), across_N4.unbind(1), strict=True):
            taken_NC = flat_PC.index_select(0, row_N * columns + column_N)
            found_NC = found_NC + taken_NC * (down_N * across_N)[:, None]
    return found_NC


def _cubic_taps(place_N: Tensor, side_N: Tensor, table_side: int) -> tuple[Tensor, Tensor]:
    source_N = (place_N.float() + 0.5) * (table_side / side_N.float()) - 0.5
    first_N = source_N.floor()
    t_N = source_N - first_N
    weights_N4 = torch.stack([_outer(t_N + 1), _inner(t_N), _inner(1 - t_N), _outer(2 - t_N)], dim=1)
    place_N4 = first_N.to(torch.int32)[:, None] + torch.arange(-1, 3, dtype=torch.int32)
    return place_N4.clamp(0, table_side - 1), weights_N4


def _inner(x: Tensor) -> Tensor:
    return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1


def _outer(x: Tensor) -> Tensor:
    return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC


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
    entries: Tensor = (row_NA[:, :, None] * table.side + column_NA[:, None, :]).flatten(1)
    return entries


def weights(table: Table, positions_N2: Tensor, sizes_N2: Tensor) -> Tensor:
    """Return the share of each entry, [N, K] in float32."""
    if table.mode == ANTIALIASED:
        stride_N21 = (table.side / sizes_N2.float())[:, :, None]
        middle_A, middle_N21 = torch.arange(table.side).float() + 0.5, positions_N2[:, :, None].float() + 0.5
        far_N2A = (middle_A - middle_N21 * stride_N21).abs()
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
    shares: Tensor = (row_NA[:, :, None] * column_NA[:, None, :]).flatten(1)
    return shares


def _starts(table: Table, positions_N2: Tensor, sizes_N2: Tensor) -> tuple[Tensor, Tensor]:
    if table.align_corners:
        source_N2 = positions_N2.float() * (table.side - 1) / (sizes_N2 - 1).clamp(min=1)
    else:
        source_N2 = (positions_N2.float() + 0.5) * table.side / sizes_N2 - 0.5
    return source_N2.floor().long(), source_N2


def _offsets(table: Table) -> Tensor:
    return torch.arange(0, 2) if table.mode == "bilinear" else torch.arange(-1, 3)
