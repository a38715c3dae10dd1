"""Bugs planted in the layouts without runs: windows in rows, frames in buckets; segments between bounds."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _rows(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"rows: {name}", kind=kind, file="vision/attention/padded.py", old=old, new=new)


def _shelf(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"rows: {name}", kind=kind, file="vision/attention/padded.py", old=old, new=new)


ROWS = (
    _rows(
        "empty slots belong to the first window",
        "masks",
        "torch.full((rows * capacity,), -1)",
        "torch.full((rows * capacity,), 0)",
    ),
    _rows(
        "windows begin at the end of the free room",
        "windows",
        "row * capacity + capacity - room",
        "row * capacity + room - capacity",
    ),
    Mutant(
        name="rows: free room not used up",
        kind="windows",
        file="vision/attention/padded.py",
        old="free.setdefault(room - length, [])",
        new="free.setdefault(room, [])",
        harmless="every window gets a row of its own: more work, the same result",
    ),
    _rows(
        "slots in raster order",
        "order",
        "slot_M[segments.order_M] = place_M",
        "slot_M[:] = place_M",
    ),
    _rows(
        "windows numbered in raster order",
        "windows",
        "number_S[place_M] = torch.repeat_interleave",
        "number_S[slot_M] = torch.repeat_interleave",
    ),
    _shelf("frames counted in cells", "masks", "counts[row] = length * unit", "counts[row] = length"),
    _shelf(
        "frames one cell short", "masks", "counts[row] = length * unit", "counts[row] = (length - 1) * unit"
    ),
    _shelf(
        "frames hold raster cells for slots",
        "order",
        "cells[row, :length] = taken",
        "cells[row, :length] = int(starts[segment]) + torch.arange(length)",
    ),
    _shelf("shelves begin at the first place", "order", "base += cells.numel()", "base += 0"),
    _shelf(
        "places counted by length, not by shelf",
        "order",
        "base + row * longest + torch",
        "base + row * length + torch",
    ),
    _rows(
        "all slots of a row see each other",
        "masks",
        "== self.numbers_WL[:, None, None, :]",
        "> self.numbers_WL[:, None, None, :] - 99",
    ),
    _shelf("keys beyond a frame are seen", "masks", "< self.count_F[:, None]", "< self.count_F[:, None] + 1"),
    _shelf(
        "keys of the last patch are not seen",
        "masks",
        "< self.count_F[:, None]",
        "< (self.count_F[:, None] - 1).clamp(min=1)",
    ),
    _shelf(
        "frames not put back",
        "order",
        "torch.cat(found).index_select(0, self.places_S)",
        "torch.cat(found).index_select(0, self.places_S.sort().values)",
    ),
    _shelf(
        "scale squared on shelves",
        "arithmetic",
        "bucket.take(x, slots, self.unit) for x in (q_PHD, k_PHD, v_PHD))",
        "bucket.take(x, slots, self.unit) for x in (q_PHD * scale, k_PHD, v_PHD))",
    ),
)


def _bounds(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"bounds: {name}", kind=kind, file="vision/attention/cu_seqlens.py", old=old, new=new)


BOUNDS = (
    _bounds("segments counted in cells", "masks", "cut.lengths_S * unit", "cut.lengths_S"),
    _bounds(
        "the last segment has no end",
        "masks",
        ".cumsum(0), (1, 0)",
        ".cumsum(0)[:-1], (1, 0)",
    ),
    Mutant(
        name="bounds: segments begin one row early",
        kind="masks",
        file="vision/attention/kernels.py",
        old="(rows[start:stop].transpose(0, 1)",
        new="(rows[max(0, start - 1) : stop - (start > 0)].transpose(0, 1)",
    ),
)
