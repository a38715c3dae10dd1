"""Packing of towers that are a class of transformers: whole images of one size, or patches of any grid.

M cells of a call, N patches, K taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from vlexport.specs import Dim, MediaBounds, MediaItem, Multiple, Range, Symbol
from vlexport.vision import grid
from vlexport.vision.attention.packing import Mixes, Packing, Structure
from vlexport.vision.attention.segmentation import CallSizes, Segmentation, Segments, SegmentSizes
from vlexport.vision.features.pixels import ImageRule, PictureRule
from vlexport.vision.grid_tower import GridPacking, grids_of
from vlexport.vision.position_tables import Table, taps, weights
from vlexport.vision.preprocess import PatchRule, check_patches

# Images of the largest call of profile `any`.
MOST_IMAGES = 256


class ImagePacking(Packing):
    """Images of one size; a cell is a whole image, and an image gives `cell_tokens` tokens."""

    cells: ClassVar[Symbol] = Symbol("images")
    segmentations = (Segmentation(name="image", largest=1),)

    def __init__(self, rule: ImageRule | PictureRule, cell_tokens: int, outputs: tuple[str, ...]) -> None:
        self.rule = rule
        self.merge = rule.side // rule.patch
        self.row_width = rule.row_width
        self.cell_tokens = cell_tokens
        self.outputs = outputs

    def check(self, media: Sequence[MediaItem]) -> None:
        grid.check_grids(grids_of(media), self.merge)
        check_patches(media, self.row_width)

    def structure(self, media: Sequence[MediaItem]) -> Structure:
        return {"grids": grids_of(media)}

    def segments(self, structure: Structure) -> Mapping[str, Segments]:
        grids_I3 = structure["grids"]
        count_I = grids_I3[:, 0] * grids_I3[:, 1] * grids_I3[:, 2] // self.unit
        item_M = torch.repeat_interleave(torch.arange(count_I.shape[0]), count_I)
        return {"image": Segments(order_M=torch.arange(item_M.shape[0]), lengths_S=item_M * 0 + 1)}

    def tables(self, structure: Structure, layout: str) -> dict[str, Tensor]:
        image = self.segments(structure)["image"]
        order_M = image.order_M.to(torch.int32)
        if layout != "grouped":
            return {"order": order_M}
        count = image.lengths_S.sum()
        runs_12 = torch.stack([count, count * 0 + self.unit])[None]
        return {"order": order_M, "image_runs": runs_12.to(torch.int32)}

    def axes(self, layout: str) -> Mapping[str, Mapping[int, Dim]]:
        tokens: Dim = Multiple(self.cell_tokens, self.cells) if self.cell_tokens > 1 else self.cells
        rows: Dim = Multiple(self.unit, self.cells) if self.unit > 1 else self.cells
        return {
            "patches": {0: rows},
            "order": {0: self.cells},
            **{name: {0: tokens} for name in self.outputs},
        }

    def sizes(self, bounds: MediaBounds | None) -> CallSizes:
        most = MOST_IMAGES if bounds is None else bounds.max_images + bounds.max_frames
        one = Range(1, 1, 1)
        cells = Range(1, min(4, most), most)
        return CallSizes(cells=cells, segments={"image": SegmentSizes(count=cells, length=one, runs=one)})

    def capacity(self, tokens: int, frames: int) -> tuple[int, Mapping[str, int]]:
        images = max(1, tokens // self.cell_tokens)
        return images, {"image": images}

    def mixes(self) -> Mixes:
        side = self.merge
        image, video = ("image", (1, side, side)), ("video", (3, side, side))
        return {
            "one image": [image],
            "two images": [image] * 2,
            "video": [video],
            "mix": [image, video, image],
        }


class PicturePacking(ImagePacking):
    """Pictures of which a class takes one at a time."""

    is_one = True

    def sizes(self, bounds: MediaBounds | None) -> CallSizes:
        one = Range(1, 1, 1)
        return CallSizes(cells=one, segments={"image": SegmentSizes(count=one, length=one, runs=one)})

    def capacity(self, tokens: int, frames: int) -> tuple[int, Mapping[str, int]]:
        return 1, {"image": 1}

    def mixes(self) -> Mixes:
        # Tables of two are traced; an engine takes one.
        return {"one image": [("image", (1, 1, 1))], "two images": [("image", (1, 1, 1))] * 2}


class TablePacking(GridPacking):
    """Patches of any grid for a class that takes its tables: positions and taps of a table of positions."""

    takes_cells = False

    def __init__(
        self, rule: PatchRule, window_side: int | None, table: Table | None, outputs: tuple[str, ...]
    ) -> None:
        super().__init__(rule, window_side, outputs[1:])
        self.table = table
        self.per_patch = ("positions",) if table is None else ("positions", "taps", "tap_weights")

    def row_tables(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        tables, grids_I3 = dict(super().row_tables(structure, order_M)), structure["grids"]
        if self.table is not None:
            tables["taps"] = taps(self.table, tables["positions"], grid.patch_sides(grids_I3, self.merge))
        return tables

    def row_weights(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        if self.table is None:
            return {}
        places = (
            function(structure["grids"], self.merge) for function in (grid.patch_positions, grid.patch_sides)
        )
        return {"tap_weights": weights(self.table, *places)}


class PooledPacking(TablePacking):
    """Frames of any grid for a class that makes one row of each, with a learned query."""

    segmentations = (Segmentation(name="group", queries=1), Segmentation(name="frame", within="group"))

    def __init__(self, rule: PatchRule, table: Table, outputs: tuple[str, ...]) -> None:
        super().__init__(rule, None, table, outputs)
        self.segmentations, self.per_patch = type(self).segmentations, ("tap_weights",)

    def segments(self, structure: Structure) -> Mapping[str, Segments]:
        frames = super().segments(structure)["frame"]
        return {"group": frames, "frame": frames}

    def row_tables(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        return {}

    def sizes(self, bounds: MediaBounds | None) -> CallSizes:
        sizes, most = super().sizes(None), self.capacity(1, 1)[0]
        if bounds is not None:
            frames = bounds.max_images + bounds.max_frames
            sizes = self._sizes(Range(1, most, frames * most), frames=frames, usual_runs=1, largest=most)
        return replace(sizes, segments=dict.fromkeys(("group", "frame"), sizes.segments["frame"]))

    def capacity(self, tokens: int, frames: int) -> tuple[int, Mapping[str, int]]:
        count = max(tokens, frames)
        return count * (self.rule.image.max_pixels // self.rule.patch**2), {"group": count, "frame": count}
