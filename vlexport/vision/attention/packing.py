"""Packing: how images and videos become the rows of one call. Everything about shapes follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from vlexport.errors import UnsupportedError
from vlexport.specs import NAMED_BOUNDS, Dim, MediaBounds, MediaItem, Multiple, ShapeProfile, Symbol
from vlexport.vision.attention import cu_seqlens
from vlexport.vision.attention import layout as layouts
from vlexport.vision.attention.segmentation import CallSizes, Segmentation, Segments, take_cells
from vlexport.vision.preprocess import PixelNormalisation

Grid = tuple[int, int, int]
Structure = Mapping[str, Tensor]
Mixes = dict[str, list[tuple[str, Grid]]]


class Packing:
    """A family's declarations about the rows of its calls; one instance belongs to one config.

    merge          side of a cell in patches; segmentations cut cells
    row_width      values in one row of patches
    levels         how the tower normalises rows of bytes; None where rows come normalised
    segmentations  the ways that rows attend; the first one orders them
    cells          what the number of cells of a call is called
    per_patch      names of `row_tables` and `row_weights`
    structure_rows what the rows of each tensor of `structure` are called
    outputs        names of the outputs, in order
    cell_tokens    tokens that a cell becomes, where no segmentation has queries
    learned        rows that the tower itself puts before the patches of every frame; a cell is then one row
    frames_apart   whether the tokens of a frame depend on that frame alone
    is_one         whether a call holds one item alone
    takes_cells    whether an item may be some of the cells of its grid (`MediaItem.cells`)
    """

    merge: int = 1
    row_width: int
    cell_tokens: int = 1
    learned: int = 0
    levels: PixelNormalisation | None = None
    segmentations: tuple[Segmentation, ...]
    cells: ClassVar[Symbol] = Symbol("tokens")
    structure_rows: ClassVar[Mapping[str, Symbol]] = {"grids": Symbol("items")}
    per_patch: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("embeds",)
    frames_apart: ClassVar[bool] = True
    is_one: ClassVar[bool] = False
    takes_cells: ClassVar[bool] = False

    def check(self, media: Sequence[MediaItem]) -> None:
        raise NotImplementedError

    def structure(self, media: Sequence[MediaItem]) -> Structure:
        raise NotImplementedError

    def segments(self, structure: Structure) -> Mapping[str, Segments]:
        raise NotImplementedError

    def row_tables(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        """Return what a tower has to know about every patch; `order_M` is the order of the blocks."""
        raise NotImplementedError

    def row_weights(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        """Return tables of floats with a row for every patch, which no portable graph holds."""
        return {}

    def sizes(self, bounds: MediaBounds | None) -> CallSizes:
        """Return how much calls within these bounds hold; without bounds, calls of any media."""
        raise NotImplementedError

    def capacity(self, tokens: int, frames: int) -> tuple[int, Mapping[str, int]]:
        """Return cells and segments of the one call that serves up to so many tokens in so many frames."""
        raise NotImplementedError

    def mixes(self) -> Mixes:
        """Return mixes of (kind, grid) that make wrong orders and segments visible."""
        raise NotImplementedError

    def frame_groups(self, kind: str, grid: Grid) -> tuple[tuple[int, ...], ...]:
        """Return frame numbers of an item of a mix, group by group; none where positions follow the grid."""
        return ()

    @property
    def unit(self) -> int:
        return 1 if self.learned else self.merge**2

    @property
    def queried(self) -> Segmentation | None:
        """The segmentation whose queries are the outputs; without one, every cell is a token."""
        return next((kind for kind in self.segmentations if kind.queries), None)

    def prepare(self, media: Sequence[MediaItem], layout: str) -> dict[str, Tensor]:
        """Return all engine inputs of a call: integers as int32, tables of floats as float32."""
        if not self.takes_cells and any(item.cells is not None for item in media):
            raise UnsupportedError(
                "an item of some of its cells given; towers of this family take whole items. Leave out "
                "prune_before."
            )
        self.check(media)
        patches = torch.cat([item.patches for item in media]) if len(media) > 1 else media[0].patches
        structure = self.structure(media)
        tables = self.tables(structure, layout)
        return {"patches": patches, **tables, **self.row_weights(structure, tables["order"])}

    def tables(self, structure: Structure, layout: str) -> dict[str, Tensor]:
        """Return all tables of integers, as int32; `cells` of a structure are those that are there."""
        segments, kept_K = self.segments(structure), structure.get("cells")
        if kept_K is not None:
            segments = {name: whole.of_cells(kept_K) for name, whole in segments.items()}
        tables = layouts.tables(layout, self.segmentations, segments, self.unit)
        rows = self.row_tables(structure, tables["order"])
        if kept_K is not None:
            rows = {
                name: take_cells(row, kept_K, self.unit, row.shape[0] // self.unit)
                for name, row in rows.items()
            }
        tables |= rows
        return {name: table.to(torch.int32) for name, table in tables.items()}

    def axes(self, layout: str) -> Mapping[str, Mapping[int, Dim]]:
        rows: Dim = Multiple(self.unit, self.cells) if self.unit > 1 else self.cells
        tokens: Dim = self.queried.queries * self.queried.count if self.queried else self.cells
        return {
            **{name: {0: rows} for name in ("patches", *self.per_patch)},
            **layouts.axes(layout, self.segmentations, self.cells),
            **{name: {0: tokens} for name in self.outputs},
        }

    def profile(self, name: str, bounds: MediaBounds | None) -> ShapeProfile:
        return ShapeProfile(name, layouts.ranges(self.segmentations, self.cells, self.sizes(bounds)))

    def profiles(self) -> Mapping[str, ShapeProfile]:
        named = {name: self.profile(name, bounds) for name, bounds in NAMED_BOUNDS.items()}
        return {"any": self.profile("any", None), **named}

    def capture_sizes(self, tokens: int, frames: int) -> dict[Symbol, int]:
        cells, counts = self.capacity(tokens, frames)
        sizes = {self.cells: cells}
        # Eight segments may take any share of the cells; of more none takes over 1,024 or 8 times the mean.
        for kind in self.segmentations:
            count = counts[kind.name]
            sizes |= cu_seqlens.capture_sizes(kind, count, min(cells, max(1024, 8 * cells // count)))
            sizes |= {kind.count: count} if kind.queries else {}
        return sizes

    def num_tokens(self, item: MediaItem) -> int:
        if item.cells is not None:
            return len(item.cells)
        if self.queried is None:
            return item.grid[0] * item.grid[1] * item.grid[2] // self.merge**2 * self.cell_tokens
        return self.queried.queries * len(self.segments(self.structure([item]))[self.queried.name].lengths_S)

    def encoder_tokens(self, placeholders: int) -> int:
        """Return the rows of the tower behind so many slots of a prompt; of slices, the most."""
        return self.unit * self.capacity(placeholders, 1)[0]

    def attention_work(self, media: Sequence[MediaItem], layout: str) -> dict[str, tuple[int, int]]:
        """Count score entries per head, (computed, needed), of one attention of each segmentation."""
        segments = self.segments(self.structure(media))
        inputs = layouts.tables(layout, self.segmentations, segments, self.unit)
        computed = layouts.scores(layout, self.segmentations, inputs, self.unit)
        lengths = {kind.name: segments[kind.name].lengths_S * self.unit for kind in self.segmentations}
        needed = {
            kind.name: int((lengths[kind.name] * (kind.queries or lengths[kind.name])).sum())
            for kind in self.segmentations
        }
        return {name: (computed[name], needed[name]) for name in computed}
