"""Towers over grids of patches: embed, blocks with rotary positions, merge cells.   N patches, C width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from vlexport.vision import rotary
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.blocks import Block, PatchEmbed, PatchMerger
from vlexport.vision.grid_packing import GridPacking
from vlexport.vision.tower import StagedTower


class GridTower(StagedTower):
    """A vision tower with its merger; every row order is an input, so nothing depends on data."""

    def __init__(
        self,
        packing: GridPacking,
        blocks: Iterable[Block],
        merger: PatchMerger,
        *,
        head_dim: int,
        theta: float,
    ) -> None:
        super().__init__()
        self.packing, rule = packing, packing.rule
        self.patch_embed = PatchEmbed((3, rule.temporal, rule.patch, rule.patch), merger.width)
        self.blocks = nn.ModuleList(blocks)
        self.merger = merger
        self.head_dim, self.theta = head_dim, theta

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, CallLayout]:
        """Embed the patches and put their rows in the order of the first segmentation."""
        layout = CallLayout.of(inputs, self.packing.segmentations, self.packing.unit)
        frequencies = rotary.inverse_frequencies(self.head_dim, self.theta)
        layout = layout.with_rotary(rotary.angles(inputs["positions"], frequencies))
        return layout.arrange(self.patch_embed(inputs["patches"])), layout

    def finish(self, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        """Merge cells and restore raster order."""
        return {"embeds": self.merger(x).index_select(0, layout.inverse_M)}
