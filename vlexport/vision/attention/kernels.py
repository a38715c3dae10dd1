"""Attention kernels over segments, as operators that exported programs call by name.

`segment_*` take runs: `count` equal segments of `length` rows each, side by side. One unmasked call serves a
run; no score is computed that is not needed. `bounded_*` take cumulative lengths (cu_seqlens), which CUDA
devices do not send to the host, and leave rows behind the last bound alone.
N rows (patches), R runs, B bounds (segments + 1), H heads, D head width, Q query rows, P those of all
segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.errors import InputError

# Rows that MKL multiplies at a time. A rest of a call, or of a thread's part of one, is added up in other
# steps: the bits of a row would depend on how many others there are.
BLOCK = 4
# Keys from which on two products of bfloat16 are faster than torch's kernel, and the scores made at once.
LONG = 256
SCORES = 1 << 21


@torch.library.custom_op("vlexport::segment_attention", mutates_args=())
def segment_attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs_R2: Tensor, scale: float) -> Tensor:
    """Attend inside each segment of each run; rows must be in run order."""
    runs = [(count, length, length) for count, length in runs_R2.tolist()]
    return _attend_runs(q_NHD, k_NHD, v_NHD, runs, scale)


@torch.library.custom_op("vlexport::segment_cross_attention", mutates_args=())
def segment_cross_attention(
    q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs_R3: Tensor, scale: float
) -> Tensor:
    """Attend inside segments with query rows of their own; a run is (count, query rows, key rows)."""
    return _attend_runs(q_QHD, k_NHD, v_NHD, runs_R3.tolist(), scale)


def _attend_runs(
    q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs: Iterable[tuple[int, int, int]], scale: float
) -> Tensor:
    out_QHD = torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
    query_start = key_start = 0
    for count, queries, keys in runs:
        query_stop, key_stop = query_start + count * queries, key_start + count * keys
        q = _heads_first(q_QHD[query_start:query_stop], count)
        k, v = (_heads_first(rows[key_start:key_stop], count) for rows in (k_NHD, v_NHD))
        if keys >= LONG and q.dtype == torch.bfloat16 and _multiplies_bfloat16(q.device.type):
            mixed = _by_products(q, k, v, scale)
        else:
            padded = F.pad(q, (0, 0, 0, -queries % BLOCK)) if queries % BLOCK else q
            mixed = F.scaled_dot_product_attention(padded, k, v, scale=scale)[:, :, :queries]
        out_QHD[query_start:query_stop] = mixed.transpose(1, 2).flatten(0, 1)
        query_start, key_start = query_stop, key_stop
    if (query_start, key_start) != (q_QHD.shape[0], k_NHD.shape[0]):
        raise ValueError(
            f"runs cover {query_start} query and {key_start} key rows, "
            f"{q_QHD.shape[0]} and {k_NHD.shape[0]} given"
        )
    return out_QHD


def _heads_first(rows_NHD: Tensor, count: int) -> Tensor:
    """Return the rows of `count` equal segments: [count, heads, rows, width]."""
    split: Tensor = rows_NHD.unflatten(0, (count, -1))
    return split.transpose(1, 2)


@cache
def _multiplies_bfloat16(device: str) -> bool:
    """Return whether torch multiplies matrices in bfloat16 here, and its attention in float32."""
    has = torch.cpu.get_capabilities().get
    return device == "cpu" and bool(has("avx512_bf16")) and not has("amx_bf16")


def _by_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend by products of matrices in bfloat16, to which scores are rounded.

    So a second product takes the largest score of its row from each, in a column more: what remains is small
    where a weight is large, and so is what rounding takes. A column more of the values sums the weights.
    """
    width = q.shape[-1]

    def widened(rows: Tensor, last: float) -> Tensor:
        # Products of an odd number of columns are slower.
        return F.pad(F.pad(rows, (0, 1), value=last), (0, 1)).flatten(0, 1)

    mixed = torch.empty_like(q, memory_format=torch.contiguous_format)
    queries = max(1, min(SCORES // k.shape[2], q.shape[2]))
    several = max(1, SCORES // (queries * k.shape[2]))
    whole = (widened(q * scale, 0), widened(k, 1).transpose(1, 2), widened(v, 1), mixed.flatten(0, 1))
    for q_SQD, k_SDK, v_SKD, out_SQD in zip(*(rows.split(several) for rows in whole), strict=True):
        for part, out in zip(q_SQD.split(queries, 1), out_SQD.split(queries, 1), strict=True):
            scores = torch.bmm(part, k_SDK)
            part[..., width] = -scores.amax(-1)
            sums = torch.bmm(torch.bmm(part, k_SDK, out=scores).exp_(), v_SKD)
            torch.div(sums[..., :width], sums[..., width : width + 1], out=out)
    return mixed


def by_kernel(
    rows: tuple[Tensor, Tensor, Tensor], bounds: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float
) -> Tensor:
    """Attend with the kernel of CUDA devices; bounds and longest segments of the queries, then of the keys.

    Rows behind the last bound become zero: the kernel writes none of them, and memory may hold NaN there.
    """
    from torch.nn.attention import varlen

    if hasattr(varlen, "varlen_attn_out"):
        out_NHD = torch.zeros_like(rows[0], memory_format=torch.contiguous_format)
        varlen.varlen_attn_out(out_NHD, *rows, *bounds, *longest, scale=scale)
        return out_NHD
    # Versions of torch without it allocate the output themselves.
    mixed_NHD = cast("Tensor", varlen.varlen_attn(*rows, *bounds, *longest, scale=scale))
    is_inside_N = torch.arange(len(mixed_NHD), device=mixed_NHD.device) < bounds[0][-1]
    return torch.where(is_inside_N[:, None, None], mixed_NHD, 0.0)


@torch.library.custom_op("vlexport::bounded_attention", mutates_args=())
def bounded_attention(  # noqa: PLR0913  the signature of an operator
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, bounds_B: Tensor, longest: int, scale: float
) -> Tensor:
    """Attend between neighbouring bounds; rows behind the last bound become zero.

    No segment may be longer than `longest`. The kernel of CUDA devices takes half precision only.
    """
    if q_NHD.is_cuda:
        return by_kernel((q_NHD, k_NHD, v_NHD), (bounds_B, bounds_B), (longest, longest), scale)
    out_NHD = torch.zeros_like(q_NHD, memory_format=torch.contiguous_format)
    bounds = bounds_B.tolist()
    for start, stop in pairwise(bounds):
        if stop - start > longest:
            raise InputError(f"a segment of {stop - start} rows given, {longest} at most expected.")
        if stop > start:
            q, k, v = (rows[start:stop].transpose(0, 1)[None] for rows in (q_NHD, k_NHD, v_NHD))
            mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
            out_NHD[start:stop] = mixed[0].transpose(0, 1)
    return out_NHD


@torch.library.custom_op("vlexport::bounded_cross_attention", mutates_args=())
def bounded_cross_attention(  # noqa: PLR0913  the signature of an operator
    q_QHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, bounds_B: Tensor, segments: int, scale: float
) -> Tensor:
    """Attend with the same Q queries to the keys between bounds; rows of segments without keys are zero."""
    queries = q_QHD.shape[0]
    if q_QHD.is_cuda:
        q_PHD = q_QHD.repeat(segments, 1, 1)
        queries_B = torch.arange(segments + 1, device=q_QHD.device, dtype=torch.int32) * queries
        longest = (queries, k_NHD.shape[0])
        return by_kernel((q_PHD, k_NHD, v_NHD), (queries_B, bounds_B), longest, scale)
    out_PHD = q_QHD.new_zeros((segments * queries, *q_QHD.shape[1:]))
    for segment, (start, stop) in enumerate(pairwise(bounds_B.tolist())):
        if stop > start:
            q, k, v = (rows.transpose(0, 1)[None] for rows in (q_QHD, k_NHD[start:stop], v_NHD[start:stop]))
            mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
            out_PHD[segment * queries : (segment + 1) * queries] = mixed[0].transpose(0, 1)
    return out_PHD


# What tracing sees of the operators: results have the shape of the queries.
for _operator in (segment_attention, segment_cross_attention, bounded_attention):
    _operator.register_fake(lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format))
bounded_cross_attention.register_fake(
    lambda q, _k, _v, _bounds, segments, _scale: q.new_empty((segments * q.shape[0], *q.shape[1:]))
)
