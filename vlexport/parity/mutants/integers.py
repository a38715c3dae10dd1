"""Bugs planted in the integers of a tower: grids, windows, segments, tables."""

from __future__ import annotations

from vlexport.parity.mutants.mutant import Mutant


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
    _grid("inverse is the order itself", "order", "    return undo_M", "    return order_M"),
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


def _packed(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/packed.py", old=old, new=new)


TABLES = (
    _packed(
        "frame order ignores the window order", "order", "inverse_M[in_frames.order_M]", "in_frames.order_M"
    ),
    _packed(
        "frame order is not undone",
        "order",
        '"frame_inverse": grid.inverse(frame_order_M)',
        '"frame_inverse": frame_order_M',
    ),
    _packed(
        "runs counted in cells", "masks", "rows = torch.tensor([1, unit])", "rows = torch.tensor([1, 1])"
    ),
    _packed(
        "more segments of fewer rows",
        "masks",
        "rows = torch.tensor([1, unit])",
        "rows = torch.tensor([unit, 1])",
    ),
    _packed("tables in 16 bits", "types", "table.to(torch.int32)", "table.to(torch.int16).to(torch.int32)"),
    _packed(
        "frames get the angles of windows",
        "positions",
        "take_cells(cos, frame_order, unit)",
        "take_cells(cos, None, unit)",
    ),
    _packed(
        "angles left in raster order",
        "positions",
        "angles = take_cells(angles, order, unit, cells)",
        "angles = +angles",
    ),
    _packed(
        "full and windowed blocks exchanged",
        "masks",
        "layout.frames if self.full else layout.windows",
        "layout.windows if self.full else layout.frames",
    ),
    _packed(
        "attention output left in frame order",
        "order",
        "take_cells(mixed_NC, places.inverse_M, self.unit)",
        "take_cells(mixed_NC, None, self.unit)",
    ),
    _packed(
        "attention output ordered twice",
        "order",
        "take_cells(mixed_NC, places.inverse_M, self.unit)",
        "take_cells(mixed_NC, places.order_M, self.unit)",
    ),
    _packed("no residual around the MLP", "arithmetic", "x_NC + self.mlp(", "self.mlp("),
    _packed("first norm used twice", "arithmetic", "self.norm2(x_NC)", "self.norm1(x_NC)"),
    _packed("no norm before attention", "arithmetic", "take_cells(self.norm1(x_NC)", "take_cells((x_NC)"),
    Mutant(
        name="counts and lengths of runs exchanged",
        kind="masks",
        file="vision/segments.py",
        old="torch.stack([count_R, length_R], dim=-1)",
        new="torch.stack([length_R, count_R], dim=-1)",
    ),
    Mutant(
        name="segments moved the wrong way",
        kind="windows",
        file="vision/segments.py",
        old="torch.repeat_interleave(shift_S, lengths_S)",
        new="torch.repeat_interleave(-shift_S, lengths_S) % len(segments.order_M)",
    ),
)

INTEGERS = (*GRID, *TABLES)
