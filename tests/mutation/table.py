"""The table of planted bugs: which level saw each, the rate of each level, and the survivors."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutation.judge import LEVELS
from tests.mutation.mutant import NEVER_SURVIVE
from tests.mutation.running import Outcome

SEEN, UNSEEN = "x", "."
LEAST_CAUGHT = 0.97
INTRODUCTION = """\
# Planted bugs

Written by `python -m tests.mutation --write docs/results/mutants.md`. Every line is one small patch
of the library's own sources; the patched library is built and judged by every level of the gate, which know
nothing of the patch. `identity`: what a bundle is called, holds and refuses. L0: exact integers. L1: float32
structure. L2: half precision against its own noise. L3: health and caps. `crash`: the library stumbles.
`reference`: tests/reference, asked about what the gate lets pass, because a bundle's gate judges bundles.
"""


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """The page for the documentation."""
    head = ["bug", "kind", *LEVELS]
    lines = [_line(head), _line(["---"] * len(head)), *map(_row, outcomes)]
    return "\n".join([INTRODUCTION, *lines, "", *rates(outcomes), "", *survivors(outcomes), ""])


def rates(outcomes: Sequence[Outcome]) -> list[str]:
    """Share of bugs that each level sees by itself, and that all see together."""
    bugs = [each for each in outcomes if not each.mutant.harmless]
    caught = sum(each.caught for each in bugs)
    lines = [f"{caught} of {len(bugs)} caught ({caught / len(bugs):.1%})."]
    for level in LEVELS:
        seen = sum(level in each.faults for each in bugs)
        alone = sum(set(each.faults) == {level} for each in bugs)
        lines.append(f"* {level}: {seen} ({seen / len(bugs):.0%}), of these {alone} by no other level")
    return lines


def survivors(outcomes: Sequence[Outcome]) -> list[str]:
    """Bugs that nothing saw, and patches that change no result."""
    lost = [each for each in outcomes if not each.caught]
    if not lost:
        return ["No survivors."]
    return [
        "Survivors:",
        *(
            f"* {each.mutant.name} ({each.mutant.kind}): {each.mutant.harmless or 'not seen'}"
            for each in lost
        ),
    ]


def is_strong_enough(outcomes: Sequence[Outcome]) -> bool:
    """97 % caught, and none that survives is of a kind that must not."""
    bugs = [each for each in outcomes if not each.mutant.harmless]
    lost = [each for each in bugs if not each.caught]
    return len(lost) <= (1 - LEAST_CAUGHT) * len(bugs) and not any(
        each.mutant.kind in NEVER_SURVIVE for each in lost
    )


def _row(outcome: Outcome) -> str:
    marks = [SEEN if level in outcome.faults else UNSEEN for level in LEVELS]
    return _line([outcome.mutant.name, outcome.mutant.kind, *marks])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
