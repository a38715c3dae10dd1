"""Bugs planted in the form without loops: windows in rows, frames on shelves."""

from __future__ import annotations

from vlexport.parity.mutants.mutant import Mutant


def _rows(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"rows: {name}", kind=kind, file="vision/rows.py", old=old, new=new)


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
        file="vision/rows.py",
        old="free.setdefault(room - length, [])",
        new="free.setdefault(room, [])",
        harmless="every window gets a row of its own: more work, the same result",
    ),
    _rows(
        "slots in raster order",
        "order",
        "slot_M[windows.order_M] = torch.repeat_interleave(torch",
        "slot_M[:] = torch.repeat_interleave(torch",
    ),
    _rows(
        "windows numbered in raster order",
        "windows",
        "window_M[windows.order_M] = torch",
        "window_M[:] = torch",
    ),
    _rows("frames counted in cells", "masks", "counts[row] = length * unit", "counts[row] = length"),
    _rows(
        "frames one cell short", "masks", "counts[row] = length * unit", "counts[row] = (length - 1) * unit"
    ),
    _rows(
        "frames hold raster cells for slots",
        "order",
        "cells[row, :length] = taken",
        "cells[row, :length] = int(starts[frame]) + torch.arange(length)",
    ),
    _rows("shelves begin at the first place", "order", "base += cells.numel()", "base += 0"),
    _rows(
        "places counted by length, not by shelf",
        "order",
        "base + row * longest + torch",
        "base + row * length + torch",
    ),
    _rows(
        "all slots of a row see each other",
        "masks",
        "== self.segments_WL[:, None, None, :]",
        "> self.segments_WL[:, None, None, :] - 99",
    ),
    _rows("keys beyond a frame are seen", "masks", "< count_F[:, None]", "< count_F[:, None] + 1"),
    _rows(
        "keys of the last patch are not seen",
        "masks",
        "< count_F[:, None]",
        "< (count_F[:, None] - 1).clamp(min=1)",
    ),
    _rows(
        "frames not put back",
        "order",
        "torch.cat(mixed).index_select(0, self.places_S)",
        "torch.cat(mixed).index_select(0, self.places_S.sort().values)",
    ),
    _rows(
        "scale squared on shelves",
        "arithmetic",
        "attn_mask=seen[:, None, None, :], scale=scale",
        "attn_mask=seen[:, None, None, :], scale=scale**2",
    ),
)
