"""Which cells of a picture or a video its tower gets: the rules by name, and how a request names one.

A cell is the pixels of one merged token. `pixels.py` has the rules themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from vlexport.errors import InputError
from vlexport.positions.rules import check_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRule:
    """What a rule is for.

    kinds        of media; others stay whole
    is_rated     whether a rate says how many cells stay; else the pixels do
    by_frame     whether every frame has a budget of its own
    first_frame  whether the first frame stays whole
    causal       whether what stays of a frame follows from it and the one before: the rate is of each later
                 frame, not of them all
    """

    kinds: tuple[str, ...]
    is_rated: bool = True
    by_frame: bool = False
    first_frame: bool = False
    causal: bool = False

    @property
    def is_packaged(self) -> bool:
        """Whether a bundle may carry its graph; rules for streams look at two frames at a time."""
        return not (self.causal and self.is_rated)


RULES: Mapping[str, CellRule] = {
    "static": CellRule(kinds=("video",)),
    "static-frames": CellRule(kinds=("video",), by_frame=True),
    "delta": CellRule(kinds=("video",), by_frame=True, first_frame=True),
    "delta-frames": CellRule(kinds=("video",), by_frame=True, first_frame=True, causal=True),
    "contrast": CellRule(kinds=("image",)),
    "predicted": CellRule(kinds=("image", "video"), is_rated=False, causal=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CellChoice:
    """A rule, and the rate of those that have one."""

    name: str
    rate: float | None = None

    @classmethod
    def of(cls, text: str | float) -> Self:
        """Read `METHOD`, `METHOD:RATE`, or a rate, which is that of `static`."""
        name, _, rest = str(text).partition(":")
        if not rest and name not in RULES:
            name, rest = "static", name
        try:
            rate = float(rest) if rest else None
        except ValueError:
            rate = math.nan
        if name not in RULES or (rate is not None) != RULES[name].is_rated or rate != rate:
            forms = ", ".join(f"{known}:RATE" if rule.is_rated else known for known, rule in RULES.items())
            after = "" if name in RULES else " Other methods drop after the tower: prune with method."
            raise InputError(f"prune_before: {text!r} given; a rate, or one of {forms} expected.{after}")
        return cls(name=name, rate=rate if rate is None else check_rate(rate))

    @property
    def rule(self) -> CellRule:
        return RULES[self.name]

    def __str__(self) -> str:
        return self.name if self.rate is None else f"{self.name}:{self.rate:g}"

    def num_kept(self, frames: int, per_frame: int) -> int:
        """Return how many cells stay by the rate."""
        assert self.rate is not None
        if self.rule.causal:
            return kept_frame_by_frame(frames, per_frame, self.rate)
        least = per_frame if self.rule.first_frame else 1
        return max(least, math.trunc(float(frames * per_frame) * (1.0 - self.rate)))


def kept_frame_by_frame(frames: int, per_frame: int, rate: float) -> int:
    """Return how many tokens stay where the first frame stays whole and each later one by the rate."""
    return per_frame + (frames - 1) * max(1, math.trunc(float(per_frame) * (1.0 - rate)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """How the items of a request are pruned.

    rate    share of tokens to drop after the tower
    method  by what: a method of rows, None for the bundle's, or a rule of cells
    before  which cells the tower gets
    """

    rate: float = 0.0
    method: str | None = None
    before: CellChoice | None = None

    @property
    def after(self) -> CellChoice | None:
        """The choice of tokens to keep after the tower, where it is made by pixels."""
        if self.method is None or self.method not in RULES:
            return None
        return CellChoice(name=self.method, rate=self.rate)

    def of(self, kind: str) -> Pruning:
        """Return what of it is for a kind of media."""
        before = self.before if self.before and kind in self.before.rule.kinds else None
        is_for = self.after is None or kind in self.after.rule.kinds
        return replace(self, before=before) if is_for else Pruning(before=before)
