"""Intervals of measured shares and means that hold the true value 95 times of 100."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Normal quantile of 0.975.
Z = 1.959964
RESAMPLES, AT_ONCE = 2000, 500
# Of fewer values the resampled means are too close together to bound anything.
LEAST = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and the bounds of its interval, where it has one."""

    value: float
    low: float | None
    high: float | None

    def text(self, scale: float = 1.0, form: str = ".1f") -> str:
        """Return the value with its bounds, scaled, as `91.2 (89.9 to 92.4)`."""
        if self.low is None or self.high is None:
            return f"{self.value * scale:{form}}"
        return f"{self.value * scale:{form}} ({self.low * scale:{form}} to {self.high * scale:{form}})"


def wilson(right: float, total: int) -> Estimate:
    """Return the share of successes with Wilson's score interval, which is never outside 0 to 1.

    `right` may be a fraction: the mean number over repetitions of the same trials.
    """
    share = right / total
    centre = (share + Z**2 / (2 * total)) / (1 + Z**2 / total)
    reach = Z / (1 + Z**2 / total) * math.sqrt(share * (1 - share) / total + (Z / (2 * total)) ** 2)
    return Estimate(value=share, low=max(0.0, centre - reach), high=min(1.0, centre + reach))


def mean(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean and, from ten values on, the bounds of 95 % of resampled means."""
    found = torch.tensor(values, dtype=torch.float64)
    if len(values) < LEAST:
        return Estimate(value=float(found.mean()), low=None, high=None)
    source = torch.Generator().manual_seed(seed)
    means = torch.cat(
        [
            found[torch.randint(len(values), (AT_ONCE, len(values)), generator=source)].mean(-1)
            for _ in range(RESAMPLES // AT_ONCE)
        ]
    )
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value=float(found.mean()), low=low, high=high)
