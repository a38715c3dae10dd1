"""How long commands took on this machine, phase by phase, from which a bar and `plan` predict the next."""

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


def recall(*kind: str) -> Timings | None:
    """Return what the last work of a kind took, such as `build`, backend, dtype; None before the first."""
    try:
        stored = json.loads(_file(kind).read() or b"null")
        phases = {str(name): float(seconds) for name, seconds in stored["phases"].items()}
        return Timings(phases=phases, weights=int(stored["weights"]))
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def keep(timings: Timings, *kind: str) -> None:
    """Keep what work of a kind took."""
    _file(kind).write(json.dumps({"phases": timings.phases, "weights": timings.weights}).encode())


def build_seconds(backend: str, dtype: str, weights: int) -> tuple[float, str]:
    """Return how long a build will take, by the last one and the rule of thumb, and what is known of it."""
    last, seconds = recall("build", backend, dtype), FIRST_SECONDS + SECONDS_PER_WEIGHT * weights
    if last is None:
        return seconds, "rule of thumb: two cores, onnxruntime; nothing was built with this backend here yet"
    ratio = seconds / (FIRST_SECONDS + SECONDS_PER_WEIGHT * last.weights) if last.weights and weights else 1.0
    return sum(last.phases.values()) * ratio, "the last build by this backend here"


def _file(kind: tuple[str, ...]) -> CacheFile:
    return CacheFile.of("timings", *kind)
