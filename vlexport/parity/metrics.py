"""Distance of one tensor of token rows from another, in float64.   T tokens, C width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

# The largest finite float16; peaks are measured against it whatever the dtype of the engine.
HALF_MAX = 65504.0
# A row that lost its contents keeps less than this share of the reference row's length.
COLLAPSED = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Errors relative to the reference's size, counts as floats; `worst_at` is the row of the worst token."""

    relative_l2: float
    worst_token: float
    worst_at: float
    median_token: float
    min_cosine: float
    max_over_rms: float
    nonfinite: float
    zero_rows: float
    collapsed_rows: float
    half_share: float

    def values(self) -> dict[str, float]:
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Incomparable:
    """The reason that two tensors cannot be compared at all."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """A stage in float64, and pairs of float32 and float64 on inputs a rounding step away."""

    wide: Tensor
    nearby: Sequence[tuple[Tensor, Tensor]] = ()

    def floor(self, narrow: Sequence[Tensor]) -> Metrics | None:
        pairs = [*((rows, self.wide) for rows in narrow), *self.nearby]
        return largest([metrics for pair in pairs if (metrics := measured(*pair))])


def largest(metrics: Sequence[Metrics]) -> Metrics | None:
    """Return metrics with the largest relative L2 and the largest worst token, each by itself."""
    if not metrics:
        return None
    return replace(
        metrics[0],
        relative_l2=max(entry.relative_l2 for entry in metrics),
        worst_token=max(entry.worst_token for entry in metrics),
    )


def compare(actual: Tensor, expected: Tensor) -> Metrics | Incomparable:
    """Return metrics of `actual` against `expected`; other shapes and empty tensors are not comparable."""
    if tuple(actual.shape) != tuple(expected.shape):
        return Incomparable(reason=f"shape {list(actual.shape)} given, {list(expected.shape)} expected")
    if expected.numel() == 0:
        return Incomparable(reason=f"nothing to compare: shape {list(expected.shape)}")
    if not torch.isfinite(expected).all():
        return Incomparable(reason="the reference itself is not finite")
    if not expected.any():
        return Incomparable(reason="the reference itself is zero throughout: are the weights all zero?")
    if actual.device == expected.device and actual.data_ptr() == expected.data_ptr():
        return Incomparable(reason="the reference was compared with itself")
    width = expected.shape[-1] if expected.ndim else 1
    return _measure(
        actual.detach().double().reshape(-1, width), expected.detach().double().reshape(-1, width)
    )


def measured(actual: Tensor, expected: Tensor) -> Metrics | None:
    """Return metrics of `actual` against `expected`; none where they cannot be compared."""
    metrics = compare(actual, expected)
    return metrics if isinstance(metrics, Metrics) else None


def floor_of(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Metrics]:
    """Return the errors of outputs by name, without those that cannot be compared."""
    errors = {name: measured(rows, expected[name]) for name, rows in actual.items()}
    return {name: metrics for name, metrics in errors.items() if metrics}


def _measure(actual_TC: Tensor, expected_TC: Tensor) -> Metrics:
    error_T = (actual_TC - expected_TC).norm(dim=-1)
    size_T, found_T = expected_TC.norm(dim=-1), actual_TC.norm(dim=-1)
    total = float(expected_TC.norm())
    # A reference row of zeros has no direction: its error counts against the average row instead.
    scale_T = torch.where(size_T > 0, size_T, torch.full_like(size_T, total / math.sqrt(len(size_T))))
    token_T = error_T / scale_T
    cosine_T = (actual_TC * expected_TC).sum(-1) / (size_T * found_T)
    rms = total / math.sqrt(expected_TC.numel())
    return Metrics(
        relative_l2=_ratio(float(error_T.norm()), total),
        worst_token=_largest(token_T),
        # NaN is the largest.
        worst_at=float(token_T.argmax()),
        median_token=float(token_T.median()),
        min_cosine=float(cosine_T[size_T > 0].min()) if bool((size_T > 0).any()) else 1.0,
        max_over_rms=_ratio(_largest((actual_TC - expected_TC).abs()), rms),
        nonfinite=float((~torch.isfinite(actual_TC)).sum()),
        zero_rows=float(((found_T == 0) & (size_T > 0)).sum()),
        collapsed_rows=float(((found_T < COLLAPSED * size_T) & (found_T > 0)).sum()),
        half_share=_largest(actual_TC.abs()) / HALF_MAX,
    )


def _largest(values: Tensor) -> float:
    return float("nan") if bool(values.isnan().any()) else float(values.max())


def _ratio(error: float, size: float) -> float:
    if size > 0:
        return error / size
    return 0.0 if error == 0 else math.inf
