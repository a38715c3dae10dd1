"""Segments on shelves: a row for each, on the shelf for its size; padding is behind a row's last key.

A shelf is as long as its longest segment, and keys beyond a segment's length are not seen. Nothing is
patches x patches but the scores themselves, which a runtime's fused attention never stores.

M cells, S cell slots, U patches in a cell, F segments on a shelf, L patches of a shelf's rows, H heads,
D head width, Q queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.specs import Dim, Range, Symbol
from vlexport.vision.grid import Segments

# Three lengths keep padded work within a fifth of the ideal on mixes of pages, photos and icons.
SHELVES = ("a", "b", "c")


class ShelfNames(NamedTuple):
    """What tables and sizes of one kind of segment are called: `frame`, `frames`, `cells`."""

    segment: str
    rows: str
    cells: str

    def axes(self) -> dict[str, Mapping[int, Dim]]:
        """Which axes of the tables vary."""
        found: dict[str, Mapping[int, Dim]] = {}
        for shelf in SHELVES:
            rows, cells = Symbol(f"{self.rows}_{shelf}"), Symbol(f"{self.cells}_{shelf}")
            found[f"{self.segment}_cells_{shelf}"] = {0: rows, 1: cells}
            found[f"{self.segment}_counts_{shelf}"] = {0: rows}
        return found

    def ranges(self, rows: Range, cells: Range) -> dict[Symbol, Range]:
        """How far they vary; usual calls need one shelf."""
        found = {}
        for shelf in SHELVES:
            first = shelf == SHELVES[0]
            found[Symbol(f"{self.rows}_{shelf}")] = rows if first else Range(1, 1, rows.max)
            found[Symbol(f"{self.cells}_{shelf}")] = Range(1, cells.opt if first else 1, cells.max)
        return found


class Shelved(NamedTuple):
    """Tables of a call: cells and counts of every shelf; the place of each slot, the row of each segment."""

    tables: dict[str, Tensor]
    places_S: Tensor
    rows_F: Tensor


def shelve(name: str, segments: Segments, slot_M: Tensor, slots: int, unit: int) -> Shelved:
    """Per shelf: which cell slot each place takes, and how many patches of each row are real."""
    lengths = segments.lengths_S
    shelf_F = _cut(lengths)
    starts = lengths.cumsum(0) - lengths
    tables: dict[str, Tensor] = {}
    place_S, row_F = torch.zeros(slots, dtype=torch.int64), torch.zeros(len(lengths), dtype=torch.int64)
    base = rows = 0
    for number, shelf in enumerate(SHELVES):
        chosen = (shelf_F == number).nonzero()[:, 0]
        longest = int(lengths[chosen].max()) if len(chosen) else 1
        cells = torch.zeros(max(1, len(chosen)), longest, dtype=torch.int64)
        counts = torch.ones(max(1, len(chosen)), dtype=torch.int64)
        for row, segment in enumerate(chosen.tolist()):
            length = int(lengths[segment])
            taken = slot_M[segments.order_M[int(starts[segment]) : int(starts[segment]) + length]]
            cells[row, :length] = taken
            counts[row] = length * unit
            place_S[taken] = base + row * longest + torch.arange(length)
        tables[f"{name}_cells_{shelf}"] = cells
        tables[f"{name}_counts_{shelf}"] = counts
        row_F[chosen] = rows + torch.arange(len(chosen))
        base += cells.numel()
        rows += len(cells)
    return Shelved(tables, place_S, row_F)


def _cut(lengths_F: Tensor) -> Tensor:
    """A shelf for every segment: the two cuts between distinct lengths that waste the least work."""
    distinct, counts = lengths_F.unique(return_counts=True)
    sizes, numbers = distinct.tolist(), counts.tolist()
    before = [0]
    for number in numbers:
        before.append(before[-1] + number)

    def work(start: int, stop: int) -> int:
        return (before[stop] - before[start]) * sizes[stop - 1] ** 2 if stop > start else 0

    end = len(sizes)
    # More distinct lengths than this are thinned evenly; the cut moves by a few percent at most.
    steps = sorted({round(index * end / min(end, 64)) for index in range(min(end, 64) + 1)})
    cuts = [(low, high) for low in steps for high in steps if low <= high]
    low, high = min(cuts, key=lambda cut: work(0, cut[0]) + work(cut[0], cut[1]) + work(cut[1], end))
    rank_F = torch.searchsorted(distinct, lengths_F)
    return 2 - (rank_F >= low).long() - (rank_F >= high).long()


class Shelf(NamedTuple):
    """The segments of one shelf: which cell slot each place takes, how many patches of each row are real."""

    cells_FL: Tensor
    count_F: Tensor

    def seen(self, unit: int) -> Tensor:
        """Keys that are there: [F, 1, 1, L]. Places are counted, not listed up to a length.

        OpenVINO shares no memory between what comes before and after a shape that it has to compute.
        """
        place_FC = (self.cells_FL * 0 + 1).cumsum(1, dtype=torch.int32) - 1
        within_U = torch.arange(unit, dtype=torch.int32, device=place_FC.device)
        place_FL = (place_FC[:, :, None] * unit + within_U).flatten(1)
        keys = place_FL < self.count_F[:, None]
        return keys[:, None, None, :]

    def take(self, x_PHD: Tensor, slots: int, unit: int) -> Tensor:
        """Rows of patches as [F, H, L, D]. Sizes are spelled out for torch.export, as in `take_cells`."""
        frames, cells = self.cells_FL.shape
        heads, width = x_PHD.shape[1:]
        taken_FCX = F.embedding(self.cells_FL, x_PHD.reshape(slots, unit * heads * width))
        return taken_FCX.reshape(frames, cells * unit, heads, width).transpose(1, 2)


class Shelves(NamedTuple):
    """Attention inside segments, one a row, shelf by shelf."""

    shelves: tuple[Shelf, ...]
    places_S: Tensor
    unit: int

    def attend(self, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, scale: float) -> Tensor:
        mixed = [self._one(shelf, (q_PHD, k_PHD, v_PHD), scale) for shelf in self.shelves]
        cells_SC = torch.cat(mixed).index_select(0, self.places_S)
        return cells_SC.reshape(self.places_S.shape[0] * self.unit, *q_PHD.shape[1:])

    def _one(self, shelf: Shelf, qkv: tuple[Tensor, ...], scale: float) -> Tensor:
        (frames, cells), (heads, width) = shelf.cells_FL.shape, qkv[0].shape[1:]
        q, k, v = (shelf.take(x, self.places_S.shape[0], self.unit) for x in qkv)
        seen = shelf.seen(self.unit)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        return mixed.transpose(1, 2).reshape(frames * cells, self.unit * heads * width)


class AskedShelves(NamedTuple):
    """The same queries for every segment; answers in the order of the shelves' rows, Q at a time."""

    shelves: tuple[Shelf, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all shelves, those of empty ones too."""
        return sum(shelf.cells_FL.shape[0] for shelf in self.shelves)

    def ask(self, q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        return torch.cat([self._one(shelf, (q_QHD, k_NHD, v_NHD), scale) for shelf in self.shelves])

    def _one(self, shelf: Shelf, qkv: tuple[Tensor, ...], scale: float) -> Tensor:
        groups, (queries, heads, width) = shelf.cells_FL.shape[0], qkv[0].shape
        q = qkv[0].transpose(0, 1)[None].expand(groups, -1, -1, -1)
        k, v = (shelf.take(x, x.shape[0], 1) for x in qkv[1:])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=shelf.seen(1), scale=scale)
        return mixed.transpose(1, 2).reshape(groups * queries, heads, width)


def shelves_in(inputs: Mapping[str, Tensor], name: str) -> tuple[Shelf, ...]:
    """The shelves of a kind of segment, from a call's inputs."""
    return tuple(
        Shelf(inputs[f"{name}_cells_{shelf}"], inputs[f"{name}_counts_{shelf}"]) for shelf in SHELVES
    )
