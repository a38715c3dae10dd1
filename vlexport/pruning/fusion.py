"""What a program tells the compiler about fusion."""

from __future__ import annotations

from torch import Tensor


def stored(column_R1: Tensor) -> Tensor:
    """The same column (rows, 1), written to memory once.

    Inductor would compute it again for every element that uses it, a third of the time of a kernel: a square
    root that may set errno does not leave a loop. A view by strides makes it keep the values.
    """
    return column_R1.as_strided(column_R1.shape, (1, 1))
