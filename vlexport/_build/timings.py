"""How long commands took on this machine, phase by phase: what a bar and `plan` foretell the next one by."""

from __future__ import annotations

import json
from dataclasses import dataclass

from vlexport.bundle.user_folders import CacheFile

# A demo tower took 20 s, one of 670 million weights 111 s (docs/results/opening.md).
FIRST_SECONDS, SECONDS_PER_WEIGHT = 20.0, 0.136e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """The seconds of each phase of one kind of work, in order, and the weights that it was about."""

    phases: dict[str, float]
    weights: int = 0

    def total(self, weights: int) -> float:
        """Return the seconds for that many weights: those measured, scaled as the rule of thumb is."""
        ratio = rule_of_thumb(weights) / rule_of_thumb(self.weights) if self.weights and weights else 1.0
        return sum(self.phases.values()) * ratio


def rule_of_thumb(weights: int) -> float:
    """Return the seconds of a build by `onnxruntime` on two cores."""
    return FIRST_SECONDS + SECONDS_PER_WEIGHT * weights


def recall(*kind: str) -> Timings | None:
    """Return what the last work of a kind took, such as `build`, backend, dtype; None before the first."""
    try:
        found = json.loads(_file(kind).read() or b"null")
        phases = {str(name): float(seconds) for name, seconds in found["phases"].items()}
        return Timings(phases=phases, weights=int(found["weights"]))
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def keep(timings: Timings, *kind: str) -> None:
    """Keep what work of a kind took."""
    _file(kind).write(json.dumps({"phases": timings.phases, "weights": timings.weights}).encode())


def build_seconds(backend: str, dtype: str, weights: int) -> tuple[float, str]:
    """Return how long a build will take, and what that is known from."""
    known = recall("build", backend, dtype)
    if known is None:
        origin = "rule of thumb: two cores, onnxruntime; nothing was built with this backend here yet"
        return rule_of_thumb(weights), origin
    return known.total(weights), "the last build by this backend here"


def _file(kind: tuple[str, ...]) -> CacheFile:
    return CacheFile.of("timings", *kind)
