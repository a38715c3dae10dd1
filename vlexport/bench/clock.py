"""How long the rounds of a cell may take, so that the cells after it get theirs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from vlexport.bench.plans import Plan, Workload
from vlexport.bench.results import Entry

# Getting ready takes two runs of everybody, and where all take part a compilation: 50 to 65 s at width 1280.
RUNS_TO_GET_READY = 2
COMPILATION_S = 60


class Clock:
    """Starts when it is made."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._started = time.monotonic()

    def seconds_for(self, left: Sequence[Workload], entries: Mapping[str, Entry]) -> float:
        """For the rounds of the first workload that is left, whose contenders have just been made ready."""
        gone = time.monotonic() - self._started
        return rounds_budget(self._plan.seconds - gone, left, entries)


def rounds_budget(rest: float, left: Sequence[Workload], entries: Mapping[str, Entry]) -> float:
    """The first workload's share of the rest, what later ones need to get ready put aside."""
    now, *later = left
    steady = (entry.first_seconds or 0.0 for entry in entries.values() if entry.kind != "compiled")
    per_patch = sum(steady) / now.patches
    compilations = COMPILATION_S if any(entry.kind == "compiled" for entry in entries.values()) else 0
    ahead = sum(
        RUNS_TO_GET_READY * per_patch * each.patches + (0 if each.only_series else compilations)
        for each in later
    )
    share = now.patches * now.rounds / sum(each.patches * each.rounds for each in left)
    return max(0.0, rest - ahead) * share
