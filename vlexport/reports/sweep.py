"""What a sweep found: scores with their intervals by selector and rate, as tables, a picture and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlexport.codec import Json, decode, encode
from vlexport.errors import InputError, VlexportError
from vlexport.evaluate.baselines import BASELINES
from vlexport.evaluate.intervals import Estimate, means, wilson
from vlexport.evaluate.tasks import GROUPS
from vlexport.reports.chart import Curve, Panel, Point, draw

# The selector of the row at rate 0, and the baseline of differences.
WHOLE, BASELINE = "none", "random"
# Points of fewer questions are drawn without a curve through them.
LEAST_JOINED = 10
# All questions; where some are about images, which no selector prunes, those about videos and images apart.
ALL, VIDEOS, IMAGES = GROUPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One answer, or the means over those to several draws of a baseline.

    kept, tokens  of the video; 0 of an image, which stays whole
    right         by the task; None without one
    top1, kl      over the tokens of the un-pruned answer: share of places with the same likeliest token, and
                  divergence of the distribution from the un-pruned one, in nats
    exact         whether the answer is the un-pruned one
    first_token   seconds from the media to the first token; encode: of these, to the embeddings
    """

    kept: int
    tokens: int
    right: float | None
    top1: float
    kl: float
    exact: float
    first_token: float
    encode: float

    @property
    def score(self) -> float:
        return self.top1 if self.right is None else self.right


# Of one question, by selector and rate: one, or one for each draw.
Outcomes = Mapping[tuple[str, float], Sequence[Outcome]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Means over questions; of accuracy and exact with Wilson's interval, of the others by resampling.

    first_token  median in seconds; encode: of these, from the media to the embeddings
    over_whole   accuracy minus that at rate 0, question by question; without a task top-1 agreement
    over_random  the same minus that of `random` at this rate
    """

    questions: int
    first_token: float
    encode: float
    accuracy: Estimate | None
    top1: Estimate
    kl: Estimate
    exact: Estimate
    over_whole: Estimate | None
    over_random: Estimate | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A selector at a rate; `kept` of `tokens` are of all videos.

    categories  scores by category, and those of `videos` and `images` where a task has both
    """

    selector: str
    rate: float
    kept: int
    tokens: int
    scores: Scores
    categories: Mapping[str, Scores]

    @property
    def kept_percent(self) -> float:
        return 100 * self.kept / self.tokens if self.tokens else 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The result of a sweep: a row at rate 0, then one for each rate and selector.

    digest  of the bundle
    seeds   draws of `random` and `uniform`, whose scores are means over them
    chance  accuracy of a blind guess, over all and by category, where every question has choices
    forms   `compiled` or `eager`, by selector: only the bundle's own is compiled
    failed  questions without an answer at some rate, which are in no row
    """

    bundle: str
    digest: str
    task: str | None
    seeds: int
    chance: Mapping[str, float]
    forms: Mapping[str, str]
    rows: tuple[Row, ...]
    failed: Mapping[str, VlexportError]

    def to_json(self) -> dict[str, object]:
        return {**encode(self)}

    @staticmethod
    def from_json(content: Json) -> Sweep:
        sweep = decode(Sweep, content, "sweep")
        if not sweep.rows:
            raise InputError("sweep.rows: at least one expected.")
        if any(set(row.categories) != set(sweep.rows[0].categories) for row in sweep.rows):
            raise InputError("sweep.rows: the same categories in every row expected.")
        return sweep

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        judged = ["accuracy %"] if self.task else []
        head = ["rate", "kept", *judged, "top-1 %", "KL", "exact %", "over rate 0", f"over {BASELINE}"]
        names = list(self.rows[0].categories)
        tables = [
            (
                [title, *head, "encode ms", "first token ms"],
                [self._cells(row, row.categories.get(part, row.scores)) for row in self.rows],
            )
            for title, part in (("selector", ALL), ("videos alone", VIDEOS))
            if part == ALL or part in names
        ]
        if names:
            by_category = [
                [row.selector, f"{row.rate:g}", *(_percent(row.categories[name].accuracy) for name in names)]
                for row in self.rows
            ]
            tables.append((["accuracy %", "rate", *names], by_category))
        return tables

    def _cells(self, row: Row, scores: Scores) -> list[str]:
        return [
            row.selector,
            f"{row.rate:g}",
            f"{row.kept:,} of {row.tokens:,}",
            *([_percent(scores.accuracy)] if self.task else []),
            _percent(scores.top1),
            scores.kl.text(form=".4f"),
            _percent(scores.exact),
            _percent(scores.over_whole, "+.1f"),
            _percent(scores.over_random, "+.1f"),
            f"{scores.encode * 1e3:.1f}",
            f"{scores.first_token * 1e3:.1f}",
        ]

    def cheapest(self, most_lost: float) -> Row | None:
        """Return the row with the first token soonest of those that lose at most so many percent."""
        fine = [
            row
            for row in self.rows
            if row.selector not in BASELINES
            and (row.scores.over_whole is None or -100 * row.scores.over_whole.value <= most_lost)
        ]
        return min(fine, key=lambda row: row.scores.first_token, default=None)

    def advice(self, most_lost: float) -> str:
        """Return a line that names the cheapest row which loses no more, with its interval."""
        row = self.cheapest(most_lost)
        assert row is not None
        how = f"{row.selector} at {row.rate:g}" if row.rate else row.selector
        lost = "nothing" if row.scores.over_whole is None else f"{row.scores.over_whole.text(-100, '.1f')} %"
        whole = self.rows[0].scores.first_token
        return (
            f"cheapest that loses at most {most_lost:g} %: {how}, which loses {lost} and has its first token "
            f"{whole / row.scores.first_token:.1f} times as soon"
        )

    def svg(self) -> str:
        """Return a picture of score and time to first token over the share of video tokens kept.

        Questions about images are left out, unless there are no others.
        """
        part = VIDEOS if VIDEOS in self.rows[0].categories else ALL
        judged = "Accuracy on videos, %" if part == VIDEOS else "Accuracy, %"

        def of(row: Row) -> Scores:
            return row.categories.get(part, row.scores)

        panels = [
            Panel(
                title=judged if self.task else "Top-1 agreement with rate 0, %",
                curves=self._curves(lambda row: _point(row, of(row).accuracy or of(row).top1)),
                level=("chance", 100 * self.chance[part]) if part in self.chance else None,
                most=100.0,
            ),
            Panel(
                title="Time to first token, median, ms",
                curves=self._curves(lambda row: Point(x=row.kept_percent, y=1e3 * of(row).first_token)),
                holds=[0.0],
            ),
        ]
        return draw(Path(self.bundle).name, self.about(), "video tokens kept, %", panels)

    def about(self) -> str:
        number = self.rows[0].scores.questions
        parts = [f"{number:,} question{'' if number == 1 else 's'}, 95 % intervals"]
        if set(self.forms) & set(BASELINES):
            parts.append(f"{self.seeds} draw{'' if self.seeds == 1 else 's'} of each baseline")
        if ALL in self.chance:
            parts.append(f"chance {self.chance[ALL]:.1%}")
        if self.failed:
            parts.append(f"{len(self.failed):,} failed and left out")
        return "; ".join(parts)

    def _curves(self, point: Callable[[Row], Point]) -> list[Curve]:
        names = dict.fromkeys(row.selector for row in self.rows if row.selector != WHOLE)
        joined = self.rows[0].scores.questions >= LEAST_JOINED
        return [
            Curve(
                name=name,
                points=[point(row) for row in self.rows if row.selector in (name, WHOLE)],
                joined=joined,
            )
            for name in names
        ]


def _percent(estimate: Estimate | None, form: str = ".1f") -> str:
    return "" if estimate is None else estimate.text(100, form)


def _point(row: Row, estimate: Estimate) -> Point:
    low, high = (None if bound is None else 100 * bound for bound in (estimate.low, estimate.high))
    return Point(x=row.kept_percent, y=100 * estimate.value, low=low, high=high)


def rows_of(questions: Sequence[Outcomes], categories: Sequence[Collection[str]]) -> tuple[Row, ...]:
    """Return a row for each selector and rate from the outcomes of questions and the categories of each."""
    # Draws of one question are no questions more: they are averaged first.
    averaged = {key: [_mean(outcomes[key]) for outcomes in questions] for key in questions[0]}
    chosen = {
        name: [at for at, groups in enumerate(categories) if name in groups]
        for name in sorted({name for groups in categories for name in groups})
    }

    def scores(key: tuple[str, float], places: Sequence[int]) -> Scores:
        def picked(name: str) -> list[Outcome] | None:
            outcomes = averaged.get((name, key[1] if name == BASELINE else 0.0))
            return None if outcomes is None or name == key[0] else [outcomes[at] for at in places]

        return _scores([averaged[key][at] for at in places], picked(WHOLE), picked(BASELINE))

    return tuple(
        Row(
            selector=key[0],
            rate=key[1],
            kept=sum(outcome.kept for outcome in outcomes),
            tokens=sum(outcome.tokens for outcome in outcomes),
            scores=scores(key, range(len(questions))),
            categories={name: scores(key, places) for name, places in chosen.items()},
        )
        for key, outcomes in averaged.items()
    )


def _mean(draws: Sequence[Outcome]) -> Outcome:
    means: dict[str, Any] = {}
    for name in ("right", "top1", "kl", "exact", "first_token", "encode"):
        column = [getattr(outcome, name) for outcome in draws]
        means[name] = None if None in column else statistics.fmean(column)
    return replace(draws[0], **means)


def _scores(
    ours: Sequence[Outcome], whole: Sequence[Outcome] | None, drawn: Sequence[Outcome] | None
) -> Scores:
    count = len(ours)
    columns = {name: [getattr(outcome, name) for outcome in ours] for name in ("top1", "kl")}
    for name, others in (("over_whole", whole), ("over_random", drawn)):
        if others is not None:
            columns[name] = [one.score - other.score for one, other in zip(ours, others, strict=True)]
    estimates = dict(zip(columns, means(list(columns.values())), strict=True))
    is_judged = ours[0].right is not None
    return Scores(
        questions=count,
        first_token=statistics.median(outcome.first_token for outcome in ours),
        encode=statistics.median(outcome.encode for outcome in ours),
        accuracy=wilson(sum(outcome.right or 0.0 for outcome in ours), count) if is_judged else None,
        top1=estimates["top1"],
        kl=estimates["kl"],
        exact=wilson(sum(outcome.exact for outcome in ours), count),
        over_whole=estimates.get("over_whole"),
        over_random=estimates.get("over_random"),
    )
