"""Medians of paired ratios with bootstrap intervals, and slopes; nothing here knows what was measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median and the bounds that 95 % of resampled medians lie between."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The median of values, resampled with replacement."""
    found = torch.tensor(values, dtype=torch.float64)
    picks = torch.randint(
        len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(seed)
    )
    medians = found[picks].quantile(0.5, dim=-1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(median=statistics.median(values), low=low, high=high)


def paired(over: Sequence[float], under: Sequence[float]) -> Interval:
    """`over / under`, round by round."""
    return interval([one / other for one, other in zip(over, under, strict=True)])


def log_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent of growth by Theil and Sen: the median slope over all pairs, on logarithms."""
    points = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True)]
    return statistics.median(
        (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
    )
