"""The shape that every tower has: begin, blocks, finish.

Parity taps and per-block checks hold on to these stages, so a recipe writes no `forward` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class StagedTower(nn.Module):
    """A tower whose blocks share one layout; subclasses write `begin`, `finish`, `arrange`, `restore`."""

    blocks: nn.ModuleList

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        """Engine inputs -> the rows that the first block takes, and the layout of the call."""
        raise TypeError(f"{type(self).__name__} has no begin()")

    def finish(self, x: Tensor, layout: Any) -> dict[str, Tensor]:
        """Rows of the last block -> outputs by name."""
        raise TypeError(f"{type(self).__name__} has no finish()")

    def arrange(self, x: Tensor, layout: Any) -> Tensor:
        """Rows of patches as they came -> rows in the order of the blocks."""
        return x

    def restore(self, x: Tensor, layout: Any) -> Tensor:
        """Rows in the order of the blocks -> rows of patches as they came."""
        return x

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x, layout = self.begin(inputs)
        for block in self.blocks:
            x = block(x, layout)
        return self.finish(x, layout)
