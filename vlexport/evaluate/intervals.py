"""Intervals of measured shares, means and ratios that contain the true value 95 times of 100."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Normal quantile of 0.975.
Z = 1.959964
RESAMPLES, AT_ONCE = 10_000, 500
# Of fewer values the resampled means are too close together to bound anything.
LEAST = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and the bounds of its interval, where it has one."""

    value: float
    low: float | None
    high: float | None

    def text(self, scale: float = 1.0, form: str = ".1f") -> str:
        if self.low is None or self.high is None:
            return f"{self.value * scale:{form}}"
        return f"{self.value * scale:{form}} ({self.low * scale:{form}} to {self.high * scale:{form}})"


def wilson(right: float, total: int) -> Estimate:
    """Return a share of successes with Wilson's interval; `right` may be a mean over repeated trials."""
    share = right / total
    centre = (share + Z**2 / (2 * total)) / (1 + Z**2 / total)
    reach = Z / (1 + Z**2 / total) * math.sqrt(share * (1 - share) / total + (Z / (2 * total)) ** 2)
    return Estimate(value=share, low=max(0.0, centre - reach), high=min(1.0, centre + reach))


def means(columns: Sequence[Sequence[float]]) -> list[Estimate]:
    """Return the mean of each column and, from ten values on, the bounds of 95 % of resampled means.

    All columns are of the same things, which are drawn together.
    """
    import torch

    values_NM = torch.tensor(columns, dtype=torch.float64).T
    count, averages = len(values_NM), values_NM.mean(0).tolist()
    if count < LEAST:
        return [Estimate(value=value, low=None, high=None) for value in averages]
    source, one = torch.Generator().manual_seed(0), torch.ones(1, 1, dtype=torch.float64)
    drawn = []
    for _ in range(RESAMPLES // AT_ONCE):
        picks = torch.randint(count, (AT_ONCE, count), generator=source)
        # How often each is drawn: a product with all columns is faster than as many look-ups.
        times = torch.zeros(AT_ONCE, count, dtype=torch.float64).scatter_add_(
            1, picks, one.expand(picks.shape)
        )
        drawn.append(times @ values_NM / count)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.cat(drawn).quantile(ends, dim=0).tolist()
    bounds = zip(averages, low, high, strict=True)
    return [Estimate(value=value, low=start, high=end) for value, start, end in bounds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median, and the bounds that 95 % of resampled medians are between."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Return the median of `over / under`, round by round, with its bootstrap interval."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    return _interval(statistics.median(ratios), _resampled(ratios)[0])


def unpaired(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Return the ratio of the medians of two runs, with an interval over both resampled."""
    one, other = _resampled(over, under)
    return _interval(statistics.median(over) / statistics.median(under), one / other)


def _resampled(*runs: Sequence[float]) -> list[Tensor]:
    import torch

    source = torch.Generator().manual_seed(0)
    picks = [torch.randint(len(run), (RESAMPLES, len(run)), generator=source) for run in runs]
    values = [torch.tensor(run, dtype=torch.float64) for run in runs]
    return [run[chosen].quantile(0.5, dim=-1) for run, chosen in zip(values, picks, strict=True)]


def _interval(median: float, resampled: Tensor) -> Interval:
    low, high = resampled.quantile(resampled.new_tensor([0.025, 0.975])).tolist()
    return Interval(median=median, low=low, high=high)
