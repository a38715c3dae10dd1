"""Grouped layout: equal segments side by side, one unmasked attention call for each run of them.

R runs, S segments, N rows, H heads, D head width, Q queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vlexport.specs import Dim, Range, Symbol
from vlexport.vision.attention.kernels import segment_attention, segment_cross_attention
from vlexport.vision.attention.segmentation import Cut, Segmentation, SegmentSizes


class GroupedAttention(NamedTuple):
    """Runs of (count, length), or of (count, queries, length), and the number of all segments if queried."""

    runs_R: Tensor
    num_rows: int

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        mixed_NHD: Tensor = segment_attention(q_NHD, k_NHD, v_NHD, self.runs_R, scale)
        return mixed_NHD

    def cross_attend(self, q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor:
        q_PHD = q_QHD[None].expand(self.num_rows, -1, -1, -1).flatten(0, 1)
        mixed_PHD: Tensor = segment_cross_attention(q_PHD, k_NHD, v_NHD, self.runs_R, scale)
        return mixed_PHD


def tables(kind: Segmentation, cut: Cut, unit: int) -> dict[str, Tensor]:
    """Count the segments of each run and the rows of each of these."""
    length_R, count_R = cut.lengths_S.unique_consecutive(return_counts=True)
    columns = [count_R, length_R * unit]
    if kind.queries:
        columns.insert(1, torch.full_like(count_R, kind.queries))
    return {f"{kind.name}_runs": torch.stack(columns, dim=-1)}


def axes(kind: Segmentation) -> dict[str, Mapping[int, Dim]]:
    """Return which axes of the tables vary."""
    return {f"{kind.name}_runs": {0: Symbol(f"{kind.name}_runs")}}


def ranges(kind: Segmentation, sizes: SegmentSizes) -> dict[Symbol, Range]:
    """Return how far the number of runs varies."""
    return {Symbol(f"{kind.name}_runs"): sizes.runs}


def scores(kind: Segmentation, inputs: Mapping[str, Tensor]) -> int:
    """Count the score entries per head that a call computes."""
    count_R, *sides = inputs[f"{kind.name}_runs"].long().unbind(-1)
    return int((count_R * sides[0] * sides[-1]).sum())


def attention(kind: Segmentation, inputs: Mapping[str, Tensor]) -> GroupedAttention:
    """Return the attention that the tables of a call describe."""
    num_rows = inputs[f"{kind.name}_inverse"].shape[0] if kind.queries else 0
    return GroupedAttention(inputs[f"{kind.name}_runs"], num_rows)
