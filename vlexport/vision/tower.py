"""The shape that every tower has: begin, blocks, finish, and perhaps outputs that leave between blocks.

Parity taps and per-block checks hold on to these stages, so a recipe writes no `forward` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

from torch import Tensor, nn

from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.blocks import SwiGLU


class Tower(nn.Module):
    """Patches and tables to outputs by name.

    connectors  modules that make tokens of the rows of blocks
    """

    connectors: ClassVar[tuple[str, ...]] = ()

    def ready(self) -> Self:
        """Return the tower for inference, once its weights are loaded."""
        return self.eval()


class StagedTower(Tower):
    """A tower whose blocks share one layout; subclasses write `begin` and `finish`.

    levels  outputs that leave after a block, by name with the block's number; `level` computes them
    """

    blocks: nn.ModuleList
    levels: Mapping[str, int] = MappingProxyType({})
    connectors: ClassVar[tuple[str, ...]] = ("merger",)

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, CallLayout]:
        """Return the rows that the first block takes, and the layout of the call."""
        raise TypeError(f"{type(self).__name__} has no begin()")

    def level(self, name: str, x: Tensor, layout: CallLayout) -> Tensor:
        """Return an output from the rows of the block after which it leaves."""
        raise TypeError(f"{type(self).__name__} has no level()")

    def finish(self, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        """Return the outputs by name, from the rows of the last block."""
        raise TypeError(f"{type(self).__name__} has no finish()")

    def ready(self) -> Self:
        for layer in self.modules():
            if isinstance(layer, SwiGLU):
                layer.align()
        return super().ready()

    def levels_after(self, index: int, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        """Return the outputs that leave after a block, from its rows."""
        return {name: self.level(name, x, layout) for name, at in self.levels.items() if at == index}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x, layout = self.begin(inputs)
        levels: dict[str, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, layout)
            levels |= self.levels_after(index, x, layout)
        return {**self.finish(x, layout), **levels}
