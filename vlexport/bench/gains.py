"""What dropping video tokens gave: time to first token, tokens per second, and the bound beside the gain."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from vlexport.bench.ratios import Interval, paired
from vlexport.bench.results import Answered, QuestionCell

HEAD = (
    "| dropped | prompt tokens | preprocess | tower | prune, positions | prefill | first token, s "
    "| times as soon | allowed at this rate | allowed at any rate | tokens per second | times as fast |"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """One rate against none, rounds paired.

    allowed   how much sooner the first token came if prefill shrank with the prompt and pruning were free
    ceiling   how much sooner if there were no prefill at all: preprocessing and tower remain
    """

    answered: Answered
    first_token: float
    sooner: Interval
    allowed: float
    ceiling: float
    tokens_per_second: float
    faster: Interval


def gains(cell: QuestionCell) -> list[Gain]:
    """Every rate of the question; the first one drops nothing."""
    whole = cell.answers[0]
    return [_gain(whole, answered) for answered in cell.answers]


def _gain(whole: Answered, pruned: Answered) -> Gain:
    share = pruned.prompt_tokens / whole.prompt_tokens
    before, after = whole.column("first_token"), pruned.column("first_token")
    reading = whole.column("prefill")
    rest = [total - read for total, read in zip(before, reading, strict=True)]
    pairs = list(zip(rest, reading, strict=True))
    return Gain(
        answered=pruned,
        first_token=statistics.median(after),
        sooner=paired(before, after),
        allowed=statistics.median((other + read) / (other + read * share) for other, read in pairs),
        ceiling=statistics.median((other + read) / other for other, read in pairs),
        tokens_per_second=1 / statistics.median(pruned.column("per_token")),
        faster=paired(whole.column("per_token"), pruned.column("per_token")),
    )


def table(cell: QuestionCell) -> Iterator[str]:
    """The question in Markdown."""
    yield f"### {cell.question.capitalize()}"
    yield ""
    yield (
        f"{cell.frames} frames of {cell.side}x{cell.side}, {cell.answers[0].visual_tokens} video tokens "
        f"before pruning, {cell.new_tokens} tokens of answer, {len(cell.answers[0].rounds)} rounds; "
        "seconds are medians. "
        "Allowed at a rate is what would come of a prefill that shrinks with the prompt and a pruning "
        "that costs nothing; at any rate, of no prefill at all."
    )
    yield ""
    yield HEAD
    yield "|" + "---|" * HEAD.count(" | ") + "---|"
    for gain in gains(cell):
        yield f"| {' | '.join(_columns(gain))} |"
    yield ""


def _columns(gain: Gain) -> list[str]:
    answered = gain.answered

    def seconds(*stages: str) -> str:
        columns = [answered.column(stage) for stage in stages]
        return f"{statistics.median(map(sum, zip(*columns, strict=True))):.3g}"

    return [
        f"{answered.rate:.0%}",
        str(answered.prompt_tokens),
        seconds("preprocess"),
        seconds("tower"),
        seconds("prune", "positions"),
        seconds("prefill"),
        f"{gain.first_token:.3g}",
        str(gain.sooner),
        f"{gain.allowed:.2f}",
        f"{gain.ceiling:.2f}",
        f"{gain.tokens_per_second:.1f}",
        str(gain.faster),
    ]
