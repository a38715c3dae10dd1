"""Bugs planted in the integers of a tower: grids, windows, segments, tables."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _grid(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/grid.py", old=old, new=new)


GRID = (
    _grid("window columns taken from rows", "windows", "found.column_M // side", "found.row_M // side"),
    _grid(
        "window rows counted by height", "windows", "// side * across_I[item_M]", "// side * down_I[item_M]"
    ),
    _grid(
        "partial windows on the right dropped",
        "windows",
        "across_I = (grids_I3[:, 2] // merge + side - 1) // side",
        "across_I = (grids_I3[:, 2] // merge // side).clamp(min=1)",
    ),
    _grid(
        "windows in reverse order",
        "windows",
        "window_M.argsort(stable=True)",
        "(-window_M).argsort(stable=True)",
    ),
    _grid(
        "windows shared by all frames of an item",
        "windows",
        "+ (found.frame_M - first_frame_I[item_M]) * per_frame_I[item_M]",
        "+ 0 * per_frame_I[item_M]",
    ),
    _grid(
        "windows shared by items",
        "windows",
        "first_window_I[item_M]\n        +",
        "0 * first_window_I[item_M]\n        +",
    ),
    _grid(
        "attention across the frames of a video",
        "masks",
        "torch.repeat_interleave(per_frame_I, grids_I3[:, 0])",
        "per_frame_I * grids_I3[:, 0]",
    ),
    _grid(
        "row and column positions swapped",
        "positions",
        "[row_Mmm.flatten(), column_Mmm.flatten()]",
        "[column_Mmm.flatten(), row_Mmm.flatten()]",
    ),
    _grid(
        "patches of a cell numbered down first",
        "positions",
        "inside[None, :, None]",
        "inside[None, None, :]",
    ),
    _grid("positions of cells, not patches", "positions", "(found.row_M * merge)", "found.row_M"),
    _grid(
        "positions shifted by one",
        "positions",
        "inside = torch.arange(merge)",
        "inside = torch.arange(merge) + 1",
    ),
    _grid(
        "rows of a frame counted by height",
        "order",
        "in_frame_M // columns_I[item_M]",
        "in_frame_M // rows_I[item_M]",
    ),
)


def _layout(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/attention/layout.py", old=old, new=new)


def _segments(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/attention/segmentation.py", old=old, new=new)


def _grouped(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/attention/grouped.py", old=old, new=new)


def _block(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/blocks.py", old=old, new=new)


TABLES = (
    _segments("frame order ignores the window order", "order", "slot_M=slot_M[order_M]", "slot_M=order_M"),
    _segments("inverse is the order itself", "order", "    return undo_M", "    return order_M"),
    _segments(
        "segments moved the wrong way",
        "windows",
        "torch.repeat_interleave(shift_S, lengths_S)",
        "torch.repeat_interleave(-shift_S, lengths_S) % len(segments.order_M)",
    ),
    _layout(
        "frame order is not undone",
        "order",
        '_inverse"] = inverse(cut.slot_M)',
        '_inverse"] = cut.slot_M',
    ),
    _grouped("runs counted in cells", "masks", "[count_R, length_R * unit]", "[count_R, length_R]"),
    _grouped(
        "more segments of fewer rows",
        "masks",
        "[count_R, length_R * unit]",
        "[count_R * unit, length_R]",
    ),
    _grouped(
        "counts and lengths of runs exchanged",
        "masks",
        "[count_R, length_R * unit]",
        "[length_R, count_R * unit]",
    ),
    Mutant(
        name="tables in 16 bits",
        kind="types",
        file="vision/attention/packing.py",
        old="table.to(torch.int32)",
        new="table.to(torch.int16).to(torch.int32)",
    ),
    _layout(
        "frames get the angles of windows",
        "positions",
        "take_cells(cos, view.order_M, self.unit)",
        "take_cells(cos, None, self.unit)",
    ),
    _layout(
        "angles left in raster order",
        "positions",
        "angles_NK = self.arrange(angles_NK)",
        "angles_NK = +angles_NK",
    ),
    _block(
        "full and windowed blocks exchanged",
        "masks",
        "layout.views[self.segmentation]",
        "list(layout.views.values())[self.segmentation == 'window' and len(layout.views) > 1]",
    ),
    _block(
        "attention output left in frame order",
        "order",
        "take_cells(mixed_NC, view.inverse_M, layout.unit)",
        "take_cells(mixed_NC, None, layout.unit)",
    ),
    _block(
        "attention output ordered twice",
        "order",
        "take_cells(mixed_NC, view.inverse_M, layout.unit)",
        "take_cells(mixed_NC, view.order_M, layout.unit)",
    ),
    _block("no residual around the MLP", "arithmetic", "x_NC + self.mlp(", "self.mlp("),
    _block("first norm used twice", "arithmetic", "self.norm2(x_NC)", "self.norm1(x_NC)"),
    _block("no norm before attention", "arithmetic", "take_cells(self.norm1(x_NC)", "take_cells((x_NC)"),
)

INTEGERS = (*GRID, *TABLES)
