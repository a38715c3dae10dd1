"""Padded layout, for runtimes without loops: segments as rows of a few fixed lengths.

Segments of bounded length are packed into rows as long as the largest one and keep apart by their number.
All others are in buckets: a bucket is as long as its longest segment, and keys beyond a segment's length are
not seen. Nothing is rows x rows but the scores themselves, which a runtime's fused attention never stores.

M cells, S cell slots, U rows in a cell, F segments of a bucket, L rows of each, W packed rows, H heads,
D head width, Q queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.specs import Dim, Range, Symbol
from vlexport.vision.attention.segmentation import CallSizes, Cut, Segmentation, Segments, SegmentSizes

# Three lengths keep padded work within a fifth of the ideal on mixes of pages, photos and icons.
BUCKETS = ("a", "b", "c")


def pack(segments: Segments, capacity: int) -> tuple[Tensor, Tensor]:
    """Give cells slots in rows of `capacity` by best fit; return these, and each slot's segment or -1."""
    lengths = segments.lengths_S.tolist()
    free: dict[int, list[int]] = {}
    starts, rows = [0] * len(lengths), 0
    for segment in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[segment]
        room = next((size for size in range(length, capacity) if free.get(size)), None)
        if room is None:
            row, room, rows = rows, capacity, rows + 1
        else:
            row = free[room].pop()
        starts[segment] = row * capacity + capacity - room
        if room > length:
            free.setdefault(room - length, []).append(row)
    shift_S = torch.tensor(starts) - (segments.lengths_S.cumsum(0) - segments.lengths_S)
    place_M = torch.arange(len(segments.order_M)) + torch.repeat_interleave(shift_S, segments.lengths_S)
    slot_M = torch.empty_like(place_M)
    slot_M[segments.order_M] = place_M
    number_S = torch.full((rows * capacity,), -1)
    number_S[place_M] = torch.repeat_interleave(torch.arange(len(lengths)), segments.lengths_S)
    return slot_M, number_S.view(rows, capacity)


class PackedRows(NamedTuple):
    """Attention inside the segments of a row; empty slots share number -1 and see only each other."""

    numbers_WL: Tensor

    def attend(self, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, scale: float) -> Tensor:
        rows, length = self.numbers_WL.shape
        q, k, v = (x.reshape(rows, length, *x.shape[1:]).transpose(1, 2) for x in (q_PHD, k_PHD, v_PHD))
        same = self.numbers_WL[:, None, :, None] == self.numbers_WL[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=same, scale=scale)
        return mixed.transpose(1, 2).flatten(0, 1)


class Bucket(NamedTuple):
    """The segments of one bucket: which cell slot each place takes, how many rows of each are real."""

    cells_FL: Tensor
    count_F: Tensor

    def seen(self, unit: int) -> Tensor:
        """Return the keys that are there: [F, 1, 1, L].

        Places are counted: OpenVINO shares no memory around a shape that it has to compute.
        """
        place_FC = (self.cells_FL * 0 + 1).cumsum(1, dtype=torch.int32) - 1
        within_U = torch.arange(unit, dtype=torch.int32, device=place_FC.device)
        place_FL = (place_FC[:, :, None] * unit + within_U).flatten(1)
        keys = place_FL < self.count_F[:, None]
        return keys[:, None, None, :]

    def take(self, x_PHD: Tensor, slots: int, unit: int) -> Tensor:
        """Take rows as [F, H, L, D]. Sizes are explicit for torch.export, as in `take_cells`."""
        segments, cells = self.cells_FL.shape
        heads, width = x_PHD.shape[1:]
        taken_FCX = F.embedding(self.cells_FL, x_PHD.reshape(slots, unit * heads * width))
        return taken_FCX.reshape(segments, cells * unit, heads, width).transpose(1, 2)


class BucketAttention(NamedTuple):
    """Attention inside segments, bucket by bucket; the place of each slot, if its rows attend."""

    buckets: tuple[Bucket, ...]
    unit: int
    places_S: Tensor | None

    @property
    def num_rows(self) -> int:
        return sum(bucket.cells_FL.shape[0] for bucket in self.buckets)

    def attend(self, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, scale: float) -> Tensor:
        assert self.places_S is not None
        slots, (heads, width) = self.places_S.shape[0], q_PHD.shape[1:]
        parts = []
        for bucket in self.buckets:
            segments, cells = bucket.cells_FL.shape
            q, k, v = (bucket.take(x, slots, self.unit) for x in (q_PHD, k_PHD, v_PHD))
            seen = bucket.seen(self.unit)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
            parts.append(mixed.transpose(1, 2).reshape(segments * cells, self.unit * heads * width))
        cells_SC = torch.cat(parts).index_select(0, self.places_S)
        return cells_SC.reshape(slots * self.unit, heads, width)

    def cross_attend(self, q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        queries, heads, width = q_QHD.shape
        parts = []
        for bucket in self.buckets:
            segments = bucket.cells_FL.shape[0]
            q = q_QHD.transpose(0, 1)[None].expand(segments, -1, -1, -1)
            k, v = (bucket.take(x, x.shape[0] // self.unit, self.unit) for x in (k_NHD, v_NHD))
            seen = bucket.seen(self.unit)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
            parts.append(mixed.transpose(1, 2).reshape(segments * queries, heads, width))
        return torch.cat(parts)


def tables(kind: Segmentation, cut: Cut, unit: int, slots: int) -> dict[str, Tensor]:
    """List for each bucket which slot each place takes and how many rows are real; and where all went."""
    bucket_F = _buckets(cut.lengths_S)
    lengths, slots_of = cut.lengths_S, cut.slot_M.split(cut.lengths_S.tolist())
    tables: dict[str, Tensor] = {}
    place_S, row_F = torch.zeros(slots, dtype=torch.int64), torch.zeros(len(lengths), dtype=torch.int64)
    base = rows = 0
    for number, bucket in enumerate(BUCKETS):
        chosen = (bucket_F == number).nonzero()[:, 0]
        longest = int(lengths[chosen].max()) if len(chosen) else 1
        cells = torch.zeros(max(1, len(chosen)), longest, dtype=torch.int64)
        counts = torch.ones(max(1, len(chosen)), dtype=torch.int64)
        for row, segment in enumerate(chosen.tolist()):
            taken = slots_of[segment]
            length = len(taken)
            cells[row, :length] = taken
            counts[row] = length * unit
            place_S[taken] = base + row * longest + torch.arange(length)
        tables[f"{kind.name}_cells_{bucket}"] = cells
        tables[f"{kind.name}_counts_{bucket}"] = counts
        row_F[chosen] = rows + torch.arange(len(chosen))
        base += cells.numel()
        rows += len(cells)
    if kind.queries:
        return {**tables, f"{kind.name}_inverse": row_F[cut.rank_S]}
    return {**tables, f"{kind.name}_places": place_S}


def _buckets(lengths_F: Tensor) -> Tensor:
    """Return the bucket of every segment: the two cuts between distinct lengths that waste the least work."""
    distinct, counts = lengths_F.unique(return_counts=True)
    sizes, numbers = distinct.tolist(), counts.tolist()
    before = [0, *accumulate(numbers)]

    def work(start: int, stop: int) -> int:
        return (before[stop] - before[start]) * sizes[stop - 1] ** 2 if stop > start else 0

    end = len(sizes)
    # More distinct lengths than this are thinned evenly; the cut moves by a few percent at most.
    steps = sorted({round(index * end / min(end, 64)) for index in range(min(end, 64) + 1)})
    cuts = [(low, high) for low in steps for high in steps if low <= high]
    low, high = min(cuts, key=lambda cut: work(0, cut[0]) + work(cut[0], cut[1]) + work(cut[1], end))
    rank_F = torch.searchsorted(distinct, lengths_F)
    return 2 - (rank_F >= low).long() - (rank_F >= high).long()


def axes(kind: Segmentation, slots: Dim) -> dict[str, Mapping[int, Dim]]:
    """Return which axes of the tables vary."""
    axes: dict[str, Mapping[int, Dim]] = {} if kind.queries else {f"{kind.name}_places": {0: slots}}
    for bucket in BUCKETS:
        rows, cells = bucket_symbols(kind.name, bucket)
        axes[f"{kind.name}_cells_{bucket}"] = {0: rows, 1: cells}
        axes[f"{kind.name}_counts_{bucket}"] = {0: rows}
    return axes


def bucket_symbols(name: str, bucket: str) -> tuple[Symbol, Symbol]:
    """Name the sizes of a bucket: its segments, and the cells of each."""
    return Symbol(f"{name}s_{bucket}"), Symbol(f"{name}_cells_{bucket}")


def packed_rows(kind: Segmentation) -> Symbol:
    """Name the number of packed rows."""
    return Symbol(f"{kind.name}_rows")


def ranges(kind: Segmentation, sizes: SegmentSizes) -> dict[Symbol, Range]:
    """Return how far the sizes of buckets vary; usual calls need one bucket."""
    ranges = {}
    for bucket in BUCKETS:
        rows, cells = bucket_symbols(kind.name, bucket)
        first = bucket == BUCKETS[0]
        ranges[rows] = sizes.count if first else Range(1, 1, sizes.count.max)
        ranges[cells] = Range(1, sizes.length.opt if first else 1, sizes.length.max)
    return ranges


def packed_ranges(kind: Segmentation, sizes: CallSizes) -> dict[Symbol, Range]:
    """Return how many packed rows there can be. Best fit leaves at most one row half empty or less."""
    assert kind.largest is not None
    most = 2 * -(-sizes.cells.max // kind.largest)
    return {packed_rows(kind): Range(1, min(most, max(1, sizes.cells.opt // kind.largest)), most)}


def scores(kind: Segmentation, inputs: Mapping[str, Tensor], unit: int) -> int:
    """Count the score entries per head that a call computes, padding included."""
    if f"{kind.name}_segments" in inputs:
        rows, length = inputs[f"{kind.name}_segments"].shape
        return rows * length**2
    sizes = (inputs[f"{kind.name}_cells_{bucket}"].shape for bucket in BUCKETS)
    return sum(rows * cells * unit * (kind.queries or cells * unit) for rows, cells in sizes)


def attention(kind: Segmentation, inputs: Mapping[str, Tensor], unit: int) -> PackedRows | BucketAttention:
    """Return the attention that the tables of a call describe."""
    if f"{kind.name}_segments" in inputs:
        return PackedRows(inputs[f"{kind.name}_segments"])
    buckets = tuple(
        Bucket(inputs[f"{kind.name}_cells_{bucket}"], inputs[f"{kind.name}_counts_{bucket}"])
        for bucket in BUCKETS
    )
    return BucketAttention(buckets, unit, None if kind.queries else inputs[f"{kind.name}_places"])
