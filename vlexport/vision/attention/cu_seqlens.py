"""Layout of captured graphs and varlen kernels: cumulative lengths give the ends of segments.

A call of one fixed size serves every smaller one: its buffers are padded, the last bound is repeated, and the
rows behind it belong to no segment. Nothing about a call is read on the host.
B bounds (segments + 1), N rows, H heads, D head width, Q queries of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.specs import Dim, Range, Symbol
from vlexport.vision.attention.kernels import bounded_attention, bounded_cross_attention
from vlexport.vision.attention.segmentation import Cut, Segmentation, SegmentSizes


class BoundedAttention(NamedTuple):
    """Bounds, the rows of the longest segment that there can be, and the number of segments if queried."""

    bounds_B: Tensor
    longest: int
    num_rows: int

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        mixed_NHD: Tensor = bounded_attention(q_NHD, k_NHD, v_NHD, self.bounds_B, self.longest, scale)
        return mixed_NHD

    def cross_attend(self, q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        mixed_PHD: Tensor = bounded_cross_attention(q_QHD, k_NHD, v_NHD, self.bounds_B, self.num_rows, scale)
        return mixed_PHD


def tables(kind: Segmentation, cut: Cut, unit: int) -> dict[str, Tensor]:
    """List where segments begin, and where the last one ends.

    The length of `longest_*`, in cells, is how far the kernel looks for rows of a segment; its values mean
    nothing. With all rows for it, 256 frames of a call of 16,384 tokens start 2.1 million blocks a layer.
    """
    tables = {f"{kind.name}_bounds": F.pad((cut.lengths_S * unit).cumsum(0), (1, 0))}
    if _is_measured(kind):
        tables[f"longest_{kind.name}"] = torch.zeros(int(cut.lengths_S.max()), dtype=torch.int32)
    return tables


def _is_measured(kind: Segmentation) -> bool:
    return kind.largest is None and not kind.queries


def axes(kind: Segmentation) -> dict[str, Mapping[int, Dim]]:
    """Return which axes of the tables vary."""
    axes: dict[str, Mapping[int, Dim]] = {f"{kind.name}_bounds": {0: Symbol(f"{kind.name}_bounds")}}
    return {**axes, f"longest_{kind.name}": {0: cells(kind)}} if _is_measured(kind) else axes


def cells(kind: Segmentation) -> Symbol:
    """Name the cells of the longest segment."""
    return Symbol(f"{kind.name}_cells")


def ranges(kind: Segmentation, sizes: SegmentSizes) -> dict[Symbol, Range]:
    """Return how far the number of bounds varies."""
    count = sizes.count
    bounds = {Symbol(f"{kind.name}_bounds"): Range(count.min + 1, count.opt + 1, count.max + 1)}
    return {**bounds, cells(kind): sizes.length} if _is_measured(kind) else bounds


def capture_sizes(kind: Segmentation, count: int, longest: int) -> dict[Symbol, int]:
    """Return the sizes of a call of up to so many segments of up to so many cells."""
    bounds = {Symbol(f"{kind.name}_bounds"): count + 1}
    return {**bounds, cells(kind): longest} if _is_measured(kind) else bounds


def scores(kind: Segmentation, inputs: Mapping[str, Tensor]) -> int:
    """Count the score entries per head that a call computes."""
    lengths_S = inputs[f"{kind.name}_bounds"].long().diff()
    return int((lengths_S * (kind.queries or lengths_S)).sum())


def attention(kind: Segmentation, inputs: Mapping[str, Tensor], unit: int) -> BoundedAttention:
    """Return the attention that the tables of a call describe."""
    longest = inputs[f"longest_{kind.name}"].shape[0] if _is_measured(kind) else kind.largest or 0
    num_rows = inputs[f"{kind.name}_inverse"].shape[0] if kind.queries else 0
    return BoundedAttention(inputs[f"{kind.name}_bounds"], unit * longest, num_rows)


def is_bounds(name: str) -> bool:
    """Return whether padding behind an input's values repeats the last one; elsewhere it is zeros."""
    return name.endswith("_bounds")
