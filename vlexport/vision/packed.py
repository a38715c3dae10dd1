"""Packed patches of any mix of images and videos: index tables of a call, and blocks that follow them.

Rows lie window by window, equal windows side by side, so most blocks need no gather; blocks that
attend inside whole frames take the rows of a frame together and put them back.
M merged cells, N = unit x M patches, C width, H heads, D head width, R runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlexport.specs import Dim, MediaBounds, Range, ShapeProfile, Symbol
from vlexport.vision import grid, rotary
from vlexport.vision.bounds import BoundedPlaces, bound_axes, bound_ranges, bound_tables
from vlexport.vision.frame_sizes import least_cells, most_cells
from vlexport.vision.preprocess import PatchRule
from vlexport.vision.rows import (
    TOKENS,
    FrameShelves,
    WindowRows,
    padded_score_counts,
    row_axes,
    row_ranges,
    row_tables,
    shelves_of,
)
from vlexport.vision.segments import attention_work, by_length, segment_attention

WINDOW_RUNS = Symbol("window_runs")
FRAME_RUNS = Symbol("frame_runs")


def index_tables(grids_I3: Tensor, merge: int, window_side: int) -> dict[str, Tensor]:
    """The integer inputs of a call, int32, from the grids alone."""
    unit = merge**2
    in_windows = by_length(grid.windows(grids_I3, merge, window_side))
    in_frames = by_length(grid.frames(grids_I3, merge))
    inverse_M = grid.inverse(in_windows.order_M)
    frame_order_M = inverse_M[in_frames.order_M]
    rows = torch.tensor([1, unit])
    tables = {
        "positions": grid.patch_positions(grids_I3, merge),
        "order": in_windows.order_M,
        "inverse": inverse_M,
        "window_runs": in_windows.runs_R2 * rows,
        "frame_order": frame_order_M,
        "frame_inverse": grid.inverse(frame_order_M),
        "frame_runs": in_frames.runs_R2 * rows,
    }
    return {name: table.to(torch.int32) for name, table in tables.items()}


def table_axes(merge: int, window_side: int) -> Mapping[str, Mapping[int, Dim]]:  # noqa: ARG001
    """Which axes of patches, tables and `embeds` vary, and how they hang together."""
    per_token = ("order", "inverse", "frame_order", "frame_inverse", "embeds")
    per_patch = ("patches", "positions")
    return {
        **{name: {0: merge**2 * TOKENS} for name in per_patch},
        **{name: {0: TOKENS} for name in per_token},
        "window_runs": {0: WINDOW_RUNS},
        "frame_runs": {0: FRAME_RUNS},
    }


class Form(NamedTuple):
    """An attention form: how its index tables are made, and which of their axes vary."""

    tables: Callable[[Tensor, int, int], dict[str, Tensor]]
    axes: Callable[[int, int], Mapping[str, Mapping[int, Dim]]]


FORMS = {
    "runs": Form(index_tables, table_axes),
    "rows": Form(row_tables, row_axes),
    "bounds": Form(bound_tables, bound_axes),
}


def any_mix(window_side: int) -> ShapeProfile:
    """Whatever fits a call of 65,536 tokens."""
    tokens = Range(1, 1024, 65536)
    ranges = {
        TOKENS: tokens,
        WINDOW_RUNS: _window_runs(window_side, tokens.max),
        FRAME_RUNS: Range(1, 4, _distinct(tokens.max)),
        **row_ranges(tokens, Range(1, 1, 4096), 65536, window_side**2),
        **bound_ranges(tokens, Range(1, 4, 4096)),
    }
    return ShapeProfile("any", ranges)


def bounded(name: str, bounds: MediaBounds, rule: PatchRule, window_side: int) -> ShapeProfile:
    """The profile of calls within these bounds; a video of odd length counts one frame more."""
    cell = rule.patch * rule.merge
    grids = -(-bounds.max_frames // rule.temporal)
    both = ((rule.image, bounds.max_images), (rule.video, grids))
    counts = [(resize, count) for resize, count in both if count]
    largest = [most_cells(resize, bounds.max_pixels, cell) for resize, _ in counts]
    most = sum(count * cells for (_, count), cells in zip(counts, largest, strict=True))
    least = min(least_cells(resize, bounds.min_pixels, cell) for resize, _ in counts)
    usual = min(max(least, bounds.max_pixels // cell**2), max(largest))
    frames = bounds.max_images + grids
    tokens = Range(least, usual, most)
    ranges = {
        TOKENS: tokens,
        WINDOW_RUNS: _window_runs(window_side, frames),
        FRAME_RUNS: Range(1, 1, min(frames, _distinct(most))),
        **row_ranges(tokens, Range(1, 1, frames), max(largest), window_side**2),
        **bound_ranges(tokens, Range(1, 1, frames)),
    }
    return ShapeProfile(name, ranges)


def _window_runs(window_side: int, frames: int) -> Range:
    """A run per size of window: whole ones and those cut at either edge or both, of every frame."""
    side = range(1, window_side + 1)
    most = min(len({rows * columns for rows in side for columns in side}), 4 * frames)
    return Range(1, min(4, most), most)


def _distinct(cells: int) -> int:
    """Frames that differ in length share these cells: 1 + 2 + ... is not more."""
    return (math.isqrt(8 * cells + 1) - 1) // 2


def score_counts(grids_I3: Tensor, merge: int, window_side: int, form: str) -> dict[str, tuple[int, int]]:
    """Score entries per head, (computed, needed), of one windowed and one full block."""
    segments = {"window": grid.windows(grids_I3, merge, window_side), "full": grid.frames(grids_I3, merge)}
    needed = {name: int(((found.lengths_S * merge**2) ** 2).sum()) for name, found in segments.items()}
    if form == "rows":
        computed = padded_score_counts(row_tables(grids_I3, merge, window_side))
    else:
        tables = index_tables(grids_I3, merge, window_side)
        runs = {"window": tables["window_runs"], "full": tables["frame_runs"]}
        computed = {name: attention_work(runs_R2.long()) for name, runs_R2 in runs.items()}
    return {name: (computed[name], needed[name]) for name in needed}


def take_cells(x_NC: Tensor, order_M: Tensor | None, unit: int, cells: int | None = None) -> Tensor:
    """Rows of whole cells in another order; the same tensor if there is none.

    `cells` is how many there are to take from, if not as many as are taken. Sizes are spelled out because
    torch.export holds inferred ones to be other than 1.
    """
    if order_M is None:
        return x_NC
    width, taken = x_NC.shape[-1], order_M.shape[0]
    cells_MC = x_NC.reshape(taken if cells is None else cells, unit * width)
    taken_NC: Tensor = cells_MC.index_select(0, order_M).reshape(taken * unit, width)
    return taken_NC


class Places(NamedTuple):
    """Runs and rotary tables of one kind of block; its own order of cells, if it is not the tower's."""

    runs_R2: Tensor
    cos_NK: Tensor
    sin_NK: Tensor
    order_M: Tensor | None
    inverse_M: Tensor | None

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        mixed_NHD: Tensor = segment_attention(q_NHD, k_NHD, v_NHD, self.runs_R2, scale)
        return mixed_NHD


class Layout(NamedTuple):
    """Everything about a call but the contents of its patches."""

    order_M: Tensor
    inverse_M: Tensor
    windows: Places | WindowRows | BoundedPlaces
    frames: Places | FrameShelves | BoundedPlaces


def layout_of(
    inputs: Mapping[str, Tensor], unit: int, head_dim: int, theta: float, window_rows: int
) -> Layout:
    """Rotary tables in row order, for windows of up to `window_rows` patches and for frames."""
    order, cells = inputs["order"], inputs["inverse"].shape[0]
    angles = rotary.angles(inputs["positions"], rotary.inverse_frequencies(head_dim, theta))
    angles = take_cells(angles, order, unit, cells)
    cos, sin = angles.cos(), angles.sin()
    if "window_segments" in inputs:
        return Layout(
            order_M=order,
            inverse_M=inputs["inverse"],
            windows=WindowRows(inputs["window_segments"], cos, sin),
            frames=shelves_of(inputs, unit, cos, sin),
        )
    frame_order = inputs["frame_order"]
    of_frames = (take_cells(cos, frame_order, unit), take_cells(sin, frame_order, unit))
    own = (frame_order, inputs["frame_inverse"])
    if "window_bounds" in inputs:
        return Layout(
            order_M=order,
            inverse_M=inputs["inverse"],
            windows=BoundedPlaces(inputs["window_bounds"], window_rows, cos, sin, None, None),
            frames=BoundedPlaces(inputs["frame_bounds"], cos.shape[0], *of_frames, *own),
        )
    return Layout(
        order_M=order,
        inverse_M=inputs["inverse"],
        windows=Places(inputs["window_runs"], cos, sin, None, None),
        frames=Places(inputs["frame_runs"], *of_frames, *own),
    )


class PackedBlock(nn.Module):
    """Attention inside windows, or inside whole frames, then an MLP; both behind a norm, both residual."""

    def __init__(
        self, norms: Sequence[nn.Module], attention: nn.Module, mlp: nn.Module, full: bool, unit: int
    ):
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = attention
        self.mlp = mlp
        self.full = full
        self.unit = unit

    def forward(self, x_NC: Tensor, layout: Layout) -> Tensor:
        places = layout.frames if self.full else layout.windows
        seen_NC = take_cells(self.norm1(x_NC), places.order_M, self.unit)
        mixed_NC = self.attn(seen_NC, places)
        x_NC = x_NC + take_cells(mixed_NC, places.inverse_M, self.unit)
        out_NC: Tensor = x_NC + self.mlp(self.norm2(x_NC))
        return out_NC


def revealing_mixes(merge: int, window_side: int) -> dict[str, list[tuple[str, tuple[int, int, int]]]]:
    """Mixes of (kind, grid) that make wrong orders, windows and segments visible; sides follow the window."""
    window = window_side * merge
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
