"""The least time of a tower: per kind of work the larger of its arithmetic and its bytes, at measured rates.

Counts are 2 per multiply-add, bytes those of bfloat16 with every elementwise step fused into its neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Measured rates a second: operations of matrix products and of attention, bytes of a copy."""

    matmul: float
    attention: float
    copy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """Sizes of a windowed tower with its merger."""

    depth: int
    full: int
    width: int
    inner: int
    row: int
    out: int
    merge: int
    window: int

    @property
    def block(self) -> int:
        """Return the weights of a block; biases and norms are left out everywhere."""
        return 4 * self.width**2 + 3 * self.width * self.inner

    @property
    def merger(self) -> int:
        wide = self.merge**2 * self.width
        return wide * (wide + self.out)

    def weights(self) -> int:
        return self.row * self.width + self.depth * self.block + self.merger

    def seconds(self, grids: Sequence[Grid], rates: Ceilings) -> float:
        rows = sum(frames * height * width for frames, height, width in grids)
        linear = rows * 2 * (self.row * self.width + self.depth * self.block + self.merger / self.merge**2)
        # Input and output of each product, once: qkv, projection, gate and up, down.
        moved = 2 * self.weights() + rows * self.depth * 2 * (8 * self.width + 3 * self.inner)
        in_windows = (self.depth - self.full) * 4 * self.width * self.window**2 * rows
        window_bytes = (self.depth - self.full) * 2 * 4 * self.width * rows
        in_frames = self.full * 4 * self.width * sum(t * (h * w) ** 2 for t, h, w in grids)
        return (
            max(linear / rates.matmul, moved / rates.copy)
            + max(in_windows / rates.attention, window_bytes / rates.copy)
            + in_frames / rates.attention
        )


def evs_seconds(rows: int, kept: int, width: int, rates: Ceilings) -> float:
    """Return the least time of pruning: every row read once, kept ones read again and written."""
    return 2 * width * (rows + 2 * kept) / rates.copy
