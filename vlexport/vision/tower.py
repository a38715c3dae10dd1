"""The shape that every tower has: begin, blocks, finish.

Parity taps and per-block checks hold on to these stages, so a recipe writes no `forward` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from torch import Tensor, nn

from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.blocks import SwiGLU


class Tower(nn.Module):
    """Patches and tables to outputs by name."""

    def ready(self) -> Self:
        """Return the tower for inference, once its weights are loaded."""
        return self.eval()


class StagedTower(Tower):
    """A tower whose blocks share one layout; subclasses write `begin` and `finish`."""

    blocks: nn.ModuleList

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, CallLayout]:
        """Return the rows that the first block takes, and the layout of the call."""
        raise TypeError(f"{type(self).__name__} has no begin()")

    def finish(self, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        """Return the outputs by name, from the rows of the last block."""
        raise TypeError(f"{type(self).__name__} has no finish()")

    def ready(self) -> Self:
        for layer in self.modules():
            if isinstance(layer, SwiGLU):
                layer.align()
        return super().ready()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x, layout = self.begin(inputs)
        for block in self.blocks:
            x = block(x, layout)
        return self.finish(x, layout)
