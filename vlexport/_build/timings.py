"""How long commands took on this machine, phase by phase, from which a bar and `plan` predict the next."""

from __future__ import annotations

import json
from bisect import bisect
from dataclasses import dataclass

from vlexport.bundle.user_folders import CacheFile

# Seconds of a first build's phases with onnxruntime in float32 on two cores, of towers of so many weights:
# `python -m benchmarks.patience`, docs/results/opening.md. Graphs are compiled beside the export.
WEIGHTS = (200_000, 196_000_000, 668_000_000)
SECONDS = {
    "hash weights": (1.0, 1.8, 3.5),
    "export": (5.1, 8.0, 23.5),
    "build": (8.2, 29.7, 48.7),
    "graphs": (31.8, 21.6, 32.0),
    "check": (0.6, 1.4, 3.0),
    "check integers": (3.4, 4.5, 7.6),
    "check reference": (0.6, 17.1, 62.7),
    "check reference in float64": (0.5, 6.1, 19.3),
    "check engine": (0.7, 13.8, 57.2),
    "check reference, blocks": (0.3, 6.7, 0.1),
    "check blocks": (0.2, 3.3, 14.4),
    "check engine blocks": (0.6, 7.3, 21.4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """The seconds of each phase of one kind of work, in order, and the weights that it was about."""

    phases: dict[str, float]
    weights: int = 0


def recall(*kind: str) -> Timings | None:
    """Return what the last work of a kind took, such as `build`, backend, dtype; None before the first."""
    try:
        stored = json.loads(CacheFile.of("timings", *kind).read() or b"null")
        phases = {str(name): float(seconds) for name, seconds in stored["phases"].items()}
        return Timings(phases=phases, weights=int(stored["weights"]))
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def keep(timings: Timings, *kind: str) -> None:
    """Keep what work of a kind took."""
    content = json.dumps({"phases": timings.phases, "weights": timings.weights})
    CacheFile.of("timings", *kind).write(content.encode())


def expected_build(backend: str, dtype: str, weights: int) -> tuple[Timings, str]:
    """Return what the phases of a build will take, and what that is known from.

    Known are the last build by the backend in the dtype, else by another, else the rule of thumb; a phase
    grows with the weights as the rule's does. Graphs are compiled once a machine.
    """
    last, origin = recall("build", backend, dtype), "the last build by this backend here"
    if last is None:
        last, origin = recall("build"), "the last build here, by another backend or in another dtype"
    rule = _rule(weights)
    if last is None:
        origin = "rule of thumb: two cores, onnxruntime, no build here yet"
        return Timings(phases=rule, weights=weights), origin
    before = _rule(last.weights)
    growth = {name: rule[name] / before[name] for name in rule}
    usual = (sum(rule.values()) - rule["graphs"]) / (sum(before.values()) - before["graphs"])
    phases = {name: seconds * growth.get(name, usual) for name, seconds in last.phases.items()}
    return Timings(phases={**phases, "graphs": 0.0}, weights=weights), origin


def _rule(weights: int) -> dict[str, float]:
    """Return the seconds of the phases, by straight lines between the sizes that were measured."""
    above = min(max(bisect(WEIGHTS, weights), 1), len(WEIGHTS) - 1)
    low, high = WEIGHTS[above - 1], WEIGHTS[above]
    share = (weights - low) / (high - low)
    return {
        name: max(times[above - 1] + share * (times[above] - times[above - 1]), 0.05)
        for name, times in SECONDS.items()
    }
