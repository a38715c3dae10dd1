"""A learned table of positions, resized to the grid of each item inside the graph.

Places and sides are integers, so a call has no table of floats and weights are the same in every runtime.
N patches, R rows and S columns of the table, P places in it, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The coefficient of torch's bicubic interpolation.
A = -0.75


def resized_rows(table_RSC: Tensor, place_N2: Tensor, sides_N2: Tensor) -> Tensor:
    """Return each patch's row of the table resized to its item, as torch does without aligned corners.

    A table of the item's own size is taken as it is: its weights come out as 0 and 1. Float32 throughout.
    """
    columns = table_RSC.shape[1]
    flat_PC = table_RSC.flatten(0, 1).float()
    (row_N4, down_N4), (column_N4, across_N4) = (
        taps(place_N2[:, axis], sides_N2[:, axis], table_RSC.shape[axis]) for axis in (0, 1)
    )
    # Sixteen sums of one row each: gathered together they are sixteen times the rows of the call.
    found_NC = flat_PC.new_zeros(())
    for row_N, down_N in zip(row_N4.unbind(1), down_N4.unbind(1), strict=True):
        for column_N, across_N in zip(column_N4.unbind(1), across_N4.unbind(1), strict=True):
            taken_NC = flat_PC.index_select(0, row_N * columns + column_N)
            found_NC = found_NC + taken_NC * (down_N * across_N)[:, None]
    return found_NC


def taps(place_N: Tensor, side_N: Tensor, table_side: int) -> tuple[Tensor, Tensor]:
    """Return the four places of a table of `table_side` that make each place of a resized side; weights."""
    source_N = (place_N.float() + 0.5) * (table_side / side_N.float()) - 0.5
    first_N = source_N.floor()
    t_N = source_N - first_N
    weights_N4 = torch.stack([_outer(t_N + 1), _inner(t_N), _inner(1 - t_N), _outer(2 - t_N)], dim=1)
    place_N4 = first_N.to(torch.int32)[:, None] + torch.arange(-1, 3, dtype=torch.int32)
    return place_N4.clamp(0, table_side - 1), weights_N4


def _inner(x: Tensor) -> Tensor:
    return ((A + 2) * x - (A + 3)) * x * x + 1


def _outer(x: Tensor) -> Tensor:
    return ((A * x - 5 * A) * x + 8 * A) * x - 4 * A
