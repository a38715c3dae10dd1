"""The same attention for captured graphs: segments lie one behind the other, and only their bounds say where.

A call of one fixed size serves every smaller one: its buffers are padded, the last bound is repeated, and the
rows behind it belong to no segment. Nothing about a call is read on the host.
N rows (patches), M merged cells, B bounds (segments + 1), H heads, D head width, Q queries of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.specs import Dim, Range, Symbol
from vlexport.vision import grid
from vlexport.vision.rows import TOKENS
from vlexport.vision.static_shapes import Padding, max_windows

WINDOW_BOUNDS = Symbol("window_bounds")
FRAME_BOUNDS = Symbol("frame_bounds")
# How buffers are filled behind what a call brings; all others with zeros, which are valid places.
PADDING: Mapping[str, Padding] = dict.fromkeys(
    ("window_bounds", "frame_bounds", "slice_bounds", "group_bounds"), "repeat_last"
)


def bound_tables(grids_I3: Tensor, merge: int, window_side: int) -> dict[str, Tensor]:
    """The integer inputs of a call, int32, from the grids alone."""
    unit = merge**2
    windows, frames = grid.windows(grids_I3, merge, window_side), grid.frames(grids_I3, merge)
    inverse_M = grid.inverse(windows.order_M)
    frame_order_M = inverse_M[frames.order_M]
    tables = {
        "positions": grid.patch_positions(grids_I3, merge),
        "order": windows.order_M,
        "inverse": inverse_M,
        "window_bounds": bounds_of(windows.lengths_S * unit),
        "frame_order": frame_order_M,
        "frame_inverse": grid.inverse(frame_order_M),
        "frame_bounds": bounds_of(frames.lengths_S * unit),
    }
    return {name: table.to(torch.int32) for name, table in tables.items()}


def bounds_of(lengths_S: Tensor) -> Tensor:
    """Where segments of these lengths begin, and where the last one ends."""
    return F.pad(lengths_S.cumsum(0), (1, 0))


def bound_axes(merge: int, window_side: int) -> Mapping[str, Mapping[int, Dim]]:  # noqa: ARG001
    """Which axes of patches, tables and `embeds` vary, and how they hang together."""
    per_token = ("order", "inverse", "frame_order", "frame_inverse", "embeds")
    return {
        **{name: {0: merge**2 * TOKENS} for name in ("patches", "positions")},
        **{name: {0: TOKENS} for name in per_token},
        "window_bounds": {0: WINDOW_BOUNDS},
        "frame_bounds": {0: FRAME_BOUNDS},
    }


def bound_ranges(tokens: Range, frames: Range) -> dict[Symbol, Range]:
    """Ranges of this form's symbols; every window holds a token, and every list of bounds starts with 0."""
    return {
        WINDOW_BOUNDS: Range(2, tokens.opt // 8 + 2, tokens.max + 1),
        FRAME_BOUNDS: Range(frames.min + 1, frames.opt + 1, frames.max + 1),
    }


def capture_sizes(budget: int, frames: int, window_side: int) -> dict[Symbol, int]:
    """Sizes of the one call that serves up to so many tokens in up to so many frames."""
    return {
        TOKENS: budget,
        WINDOW_BOUNDS: max_windows(budget, frames, frames, window_side) + 1,
        FRAME_BOUNDS: frames + 1,
    }


@torch.library.custom_op("vlexport::bounded_attention", mutates_args=())
def bounded_attention(  # noqa: PLR0913  the signature of an operator
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, bounds_B: Tensor, longest: int, scale: float
) -> Tensor:
    """Softmax attention between neighbouring bounds; rows behind the last bound become zero.

    No segment may be longer than `longest`. The kernel of CUDA devices takes half precision only.
    """
    # The kernel writes no row behind the last bound, and what memory held before could be NaN.
    out_NHD = torch.zeros_like(q_NHD, memory_format=torch.contiguous_format)
    if q_NHD.is_cuda:
        from torch.nn.attention.varlen import varlen_attn_out

        varlen_attn_out(out_NHD, q_NHD, k_NHD, v_NHD, bounds_B, bounds_B, longest, longest, scale=scale)
        return out_NHD
    bounds = bounds_B.tolist()
    for start, stop in pairwise(bounds):
        if stop > start:
            q, k, v = (rows[start:stop].transpose(0, 1)[None] for rows in (q_NHD, k_NHD, v_NHD))
            mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
            out_NHD[start:stop] = mixed[0].transpose(0, 1)
    return out_NHD


@bounded_attention.register_fake
def _(  # noqa: PLR0913
    q_NHD: Tensor,
    k_NHD: Tensor,  # noqa: ARG001
    v_NHD: Tensor,  # noqa: ARG001
    bounds_B: Tensor,  # noqa: ARG001
    longest: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
) -> Tensor:
    return torch.empty_like(q_NHD, memory_format=torch.contiguous_format)


@torch.library.custom_op("vlexport::bounded_cross_attention", mutates_args=())
def bounded_cross_attention(  # noqa: PLR0913  the signature of an operator
    q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, bounds_B: Tensor, segments: int, scale: float
) -> Tensor:
    """The same queries to the keys between every two neighbouring bounds: Q rows for each such segment.

    Rows of segments without keys are zero.
    """
    queries = q_QHD.shape[0]
    out_PHD = q_QHD.new_zeros((segments * queries, *q_QHD.shape[1:]))
    if q_QHD.is_cuda:
        from torch.nn.attention.varlen import varlen_attn_out

        q_PHD = q_QHD.repeat(segments, 1, 1)
        asked_B = torch.arange(segments + 1, device=q_QHD.device, dtype=torch.int32) * queries
        sizes = (queries, k_NHD.shape[0])
        varlen_attn_out(out_PHD, q_PHD, k_NHD, v_NHD, asked_B, bounds_B, *sizes, scale=scale)
        return out_PHD
    for segment, (start, stop) in enumerate(pairwise(bounds_B.tolist())):
        if stop > start:
            q, k, v = (rows.transpose(0, 1)[None] for rows in (q_QHD, k_NHD[start:stop], v_NHD[start:stop]))
            mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
            out_PHD[segment * queries : (segment + 1) * queries] = mixed[0].transpose(0, 1)
    return out_PHD


@bounded_cross_attention.register_fake
def _(  # noqa: PLR0913
    q_QHD: Tensor,
    k_NHD: Tensor,  # noqa: ARG001
    v_NHD: Tensor,  # noqa: ARG001
    bounds_B: Tensor,  # noqa: ARG001
    segments: int,
    scale: float,  # noqa: ARG001
) -> Tensor:
    return q_QHD.new_empty((segments * q_QHD.shape[0], *q_QHD.shape[1:]))


class BoundedPlaces(NamedTuple):
    """Bounds and rotary tables of one kind of block; its own order of cells, if it is not the tower's."""

    bounds_B: Tensor
    longest: int
    cos_NK: Tensor
    sin_NK: Tensor
    order_M: Tensor | None
    inverse_M: Tensor | None

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        mixed_NHD: Tensor = bounded_attention(q_NHD, k_NHD, v_NHD, self.bounds_B, self.longest, scale)
        return mixed_NHD
