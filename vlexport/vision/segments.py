"""Attention over segments of different length without masks and without padding.

Segments are sorted by length, so that equal ones lie side by side: a *run* is `count` segments of
`length` rows each. One unmasked attention call serves a run; no score is computed that is not needed.
N rows (patches), M cells, S segments, R runs, H heads, D head width; Q query rows of all segments together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.vision.grid import Segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Segments sorted by length: the order of cells, and (count, cells per segment) of each run."""

    order_M: Tensor
    runs_R2: Tensor


def by_length(segments: Segments) -> Runs:
    """Put equal segments side by side, shortest first; segments of one length keep their order."""
    sorted_S = segments.lengths_S.argsort(stable=True)
    lengths_S = segments.lengths_S[sorted_S]
    starts_S = (segments.lengths_S.cumsum(0) - segments.lengths_S)[sorted_S]
    shift_S = starts_S - (lengths_S.cumsum(0) - lengths_S)
    place_M = torch.arange(len(segments.order_M)) + torch.repeat_interleave(shift_S, lengths_S)
    length_R, count_R = lengths_S.unique_consecutive(return_counts=True)
    return Runs(order_M=segments.order_M[place_M], runs_R2=torch.stack([count_R, length_R], dim=-1))


def attention_work(runs_R2: Tensor) -> int:
    """Score entries per head that an engine computes for these runs: the sum of count x length^2."""
    return int((runs_R2[:, 0] * runs_R2[:, 1] ** 2).sum())


@torch.library.custom_op("vlexport::segment_attention", mutates_args=())
def segment_attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs_R2: Tensor, scale: float) -> Tensor:
    """Softmax attention inside each segment of each run; rows must be in run order."""
    out_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
    start = 0
    for count, length in runs_R2.tolist():
        stop = start + count * length

        def heads_first(
            x_NHD: Tensor, start: int = start, count: int = count, length: int = length
        ) -> Tensor:
            rows = x_NHD[start : start + count * length]
            return rows.reshape(count, length, *rows.shape[1:]).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads_first(q_NHD), heads_first(k_NHD), heads_first(v_NHD), scale=scale
        )
        out_NHD[start:stop] = mixed.transpose(1, 2).flatten(0, 1)
        start = stop
    if start != q_NHD.shape[0]:
        raise ValueError(f"runs cover {start} rows, {q_NHD.shape[0]} given")
    return out_NHD


@segment_attention.register_fake
def _(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs_R2: Tensor, scale: float) -> Tensor:  # noqa: ARG001
    return torch.empty_like(q_NHD, memory_format=torch.contiguous_format)


@torch.library.custom_op("vlexport::segment_cross_attention", mutates_args=())
def segment_cross_attention(
    q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs_R3: Tensor, scale: float
) -> Tensor:
    """Softmax attention of each segment's query rows to its own key rows, and to no others.

    A run is `count` segments with the same numbers of query rows and of key rows, in this order.
    """
    out_QHD = torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
    asked = seen = 0
    for count, queries, keys in runs_R3.tolist():
        stop_asked, stop_seen = asked + count * queries, seen + count * keys
        mixed = F.scaled_dot_product_attention(
            _heads_first(q_QHD[asked:stop_asked], count),
            _heads_first(k_NHD[seen:stop_seen], count),
            _heads_first(v_NHD[seen:stop_seen], count),
            scale=scale,
        )
        out_QHD[asked:stop_asked] = mixed.transpose(1, 2).flatten(0, 1)
        asked, seen = stop_asked, stop_seen
    if (asked, seen) != (q_QHD.shape[0], k_NHD.shape[0]):
        raise ValueError(
            f"runs cover {asked} query and {seen} key rows, {q_QHD.shape[0]} and {k_NHD.shape[0]} given"
        )
    return out_QHD


def _heads_first(rows_NHD: Tensor, count: int) -> Tensor:
    """The rows of `count` equal segments: [count, heads, rows, width]."""
    split: Tensor = rows_NHD.unflatten(0, (count, -1))
    return split.transpose(1, 2)


@segment_cross_attention.register_fake
def _(q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs_R3: Tensor, scale: float) -> Tensor:  # noqa: ARG001
    return torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
