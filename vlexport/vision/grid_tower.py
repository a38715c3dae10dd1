"""Families whose tokens are merged cells of a grid: packing into whole frames, or windows too, and the tower.

N patches, C width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from vlexport.specs import BYTES, MediaBounds, MediaItem, Range
from vlexport.vision import grid, rotary
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.attention.packing import Mixes, Packing, Structure
from vlexport.vision.attention.segmentation import CallSizes, Segmentation, Segments, SegmentSizes
from vlexport.vision.blocks import Block, PatchEmbed, PatchMerger
from vlexport.vision.preprocess import PatchRule, check_patches, first_rows, least_cells, most_cells
from vlexport.vision.static_shapes import max_windows
from vlexport.vision.tower import StagedTower

FRAME = Segmentation(name="frame")
# Cells along the side of what serves as a window in the mixes of families that have none.
NO_WINDOW = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GridConfig:
    """The numbers that shape a tower of blocks over merged cells; it takes normalised pixels or bytes."""

    depth: int
    width: int
    heads: int
    inner: int
    out_width: int
    rule: PatchRule

    def with_input(self, dtype: str) -> Self:
        return replace(self, rule=replace(self.rule, input_dtype=dtype))


class GridPacking(Packing):
    """Patches in merge-block order; `window_side` in cells, None for frames; `further` are outputs."""

    per_patch: tuple[str, ...] = ("positions",)
    takes_cells = True

    def __init__(self, rule: PatchRule, window_side: int | None = None, further: Iterable[str] = ()) -> None:
        self.rule = rule
        self.outputs = ("embeds", *further)
        self.merge = rule.merge
        self.row_width = rule.row_width
        self.levels = rule.levels if rule.input_dtype == BYTES else None
        self.window_side = window_side
        windows = () if window_side is None else (Segmentation(name="window", largest=window_side**2),)
        self.segmentations = (*windows, FRAME)

    def check(self, media: Sequence[MediaItem]) -> None:
        grid.check_grids(grids_of(media), self.merge)
        check_patches(media, self.row_width, self.unit)

    def structure(self, media: Sequence[MediaItem]) -> Structure:
        structure = {"grids": grids_of(media)}
        if all(item.cells is None for item in media):
            return structure
        kept, first = [], 0
        for item in media:
            whole = math.prod(item.grid) // self.unit
            kept.append(first + (torch.arange(whole) if item.cells is None else item.cells))
            first += whole
        return {**structure, "cells": torch.cat(kept)}

    def cells_of(self, item: MediaItem) -> Tensor:
        """Return the bytes of a whole item, cell by cell: [frames, rows, columns, colours, bytes]."""
        frames, rows, columns = item.grid[0], item.grid[1] // self.merge, item.grid[2] // self.merge
        return self.bytes_in_cells(item.patches.view(frames, rows, columns, self.unit, self.row_width))

    def bytes_in_cells(self, patches_THWUP: Tensor) -> Tensor:
        """Return the same of patches in cells."""
        levels = self.rule.levels
        if patches_THWUP.dtype != torch.uint8:
            patches_THWUP = levels.bytes_of(patches_THWUP.flatten(0, 3)).view_as(patches_THWUP)
        cells_THWCB: Tensor = patches_THWUP.unflatten(4, (len(levels.mean), -1)).transpose(3, 4).flatten(4)
        return cells_THWCB

    def segments(self, structure: Structure) -> Mapping[str, Segments]:
        grids_I3 = structure["grids"]
        segments = {"frame": grid.frames(grids_I3, self.merge)}
        if self.window_side is not None:
            segments["window"] = grid.windows(grids_I3, self.merge, self.window_side)
        return segments

    def row_tables(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        """Return row and column of every patch in the order of the items; the tower reorders them."""
        return {"positions": grid.patch_positions(structure["grids"], self.merge)}

    def sizes(self, bounds: MediaBounds | None) -> CallSizes:
        if bounds is None:
            return self._sizes(Range(1, 1024, 65536), frames=4096, usual_runs=4, largest=65536)
        cell = self.rule.patch * self.merge
        groups = -(-bounds.max_frames // self.rule.temporal)
        both = ((self.rule.image, bounds.max_images), (self.rule.video, groups))
        counts = [(resize, count) for resize, count in both if count]
        largest = [most_cells(resize, bounds.max_pixels, cell) for resize, _ in counts]
        most = sum(count * cells for (_, count), cells in zip(counts, largest, strict=True))
        least = min(least_cells(resize, bounds.min_pixels, cell) for resize, _ in counts)
        usual = min(max(least, bounds.max_pixels // cell**2), max(largest))
        frames = bounds.max_images + groups
        return self._sizes(Range(least, usual, most), frames=frames, usual_runs=1, largest=max(largest))

    def _sizes(self, cells: Range, *, frames: int, usual_runs: int, largest: int) -> CallSizes:
        # Frames that differ in length share the cells: 1 + 2 + ... is not more.
        distinct = (math.isqrt(8 * cells.max + 1) - 1) // 2
        frame = SegmentSizes(
            count=Range(1, 1, frames),
            length=Range(1, min(largest, max(1, cells.opt)), largest),
            runs=Range(1, usual_runs, min(frames, distinct)),
        )
        if self.window_side is None:
            return CallSizes(cells=cells, segments={"frame": frame})
        # A run per number of cells: fewer at an edge, and where some cells are left alone.
        runs = min(self.window_side**2, distinct)
        window = SegmentSizes(
            count=Range(1, cells.opt // 8 + 1, cells.max),
            length=Range(1, self.window_side**2, self.window_side**2),
            runs=Range(1, min(4, runs), runs),
        )
        return CallSizes(cells=cells, segments={"window": window, "frame": frame})

    def capacity(self, tokens: int, frames: int) -> tuple[int, Mapping[str, int]]:
        windows = max_windows(tokens, frames, frames, self.window_side) if self.window_side else 0
        return tokens, {"window": windows, "frame": frames}

    def mixes(self) -> Mixes:
        merge = self.merge
        window = (self.window_side or NO_WINDOW) * merge
        part = window - merge if window > merge else window
        long = 5 * window + merge
        return {
            "off both axes": [("image", (1, 2 * window + merge, 3 * window - merge))],
            "one window": [("image", (1, part, window))],
            "smallest": [("image", (1, merge, merge))],
            "order not self-inverse": [("image", (1, window + merge, 2 * window))],
            "very wide": [("image", (1, merge, long))],
            "very tall": [("image", (1, long, merge))],
            "two sizes": [("image", (1, window, 2 * window)), ("image", (1, part, merge))],
            "video": [("video", (3, window + merge, window))],
            "films": [
                ("video", (2, window + merge, 2 * window)),
                ("video", (3, window, window)),
                ("video", (2, merge, window)),
                ("video", (2, 2 * window, 2 * window + merge)),
            ],
            "mix": [
                ("image", (1, 2 * window, window + merge)),
                ("video", (2, merge, window + merge)),
                ("image", (1, merge, merge)),
                ("video", (1, window, 2 * window + merge)),
            ],
        }


def grids_of(media: Sequence[MediaItem]) -> Tensor:
    """Return the grids of items, [I, 3]."""
    return torch.tensor([item.grid for item in media], dtype=torch.int64).reshape(-1, 3)


class GridTower(StagedTower):
    """A vision tower with its merger; every row order is an input, so nothing depends on data."""

    frequencies: Tensor

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
        frequencies = rotary.inverse_frequencies(head_dim, theta)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, CallLayout]:
        layout = CallLayout.of(inputs, self.packing.segmentations, self.packing.unit)
        layout = layout.with_rotary(rotary.angles(inputs["positions"], self.frequencies))
        return layout.arrange(self.embed(inputs)), layout

    def embed(self, inputs: Mapping[str, Tensor]) -> Tensor:
        rows: Tensor = self.patch_embed(first_rows(inputs["patches"], self.packing.levels, self.patch_embed))
        return rows

    def finish(self, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        return {"embeds": self.merger(x).index_select(0, layout.inverse_M)}
