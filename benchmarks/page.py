"""A run in Markdown: paired ratios, distance to the ceiling, memory, growth; every cell."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.plans import BASELINE, TWIN
from benchmarks.results import Answered, Cell, Entry, QuestionCell, Result
from benchmarks.tables import markdown
from vlexport.bench import Interval, paired

BEGIN = "<!-- measured, written by `python -m benchmarks --page` -->"
END = "<!-- end of measured -->"

# A twin that strays further shows that the machine was too noisy to distinguish contenders.
WIDEST_TWIN = 0.05
LEAST_SIZES = 4

COLUMNS = (
    "contender", "seconds", "times as fast as Hugging Face eager", "share of the ceiling", "kB per patch",
    "relative L2",
)  # fmt: skip
ANSWERS = (
    "dropped", "prompt tokens", "preprocess", "tower", "prune, positions", "prefill", "first token, s",
    "times as soon", "allowed at this rate", "allowed at any rate", "tokens per second", "times as fast",
)  # fmt: skip
STAGES = (("preprocess",), ("tower",), ("prune", "positions"), ("prefill",), ("first_token",))


def timed(cell: Cell) -> dict[str, Entry]:
    """Return the contenders with a sample in every round."""
    count = len(cell.rounds)
    found = {name: entry for name, entry in cell.entries.items() if entry.status == "timed"}
    return {name: entry for name, entry in found.items() if len(entry.seconds) == count > 0}


def kept_rounds(cell: Cell, slow_probe: float) -> list[int]:
    """Return rounds whose product ran at this share of the cell's best; all if too few are left."""
    rates = _rates(cell, "float32")
    kept = [index for index, rate in enumerate(rates) if rate >= slow_probe * max(rates)]
    return kept if rates and len(kept) >= min(3, len(rates)) else list(range(len(cell.rounds)))


def _rates(cell: Cell, dtype: str) -> list[float]:
    """Return operations per second of the fastest library's product, round by round."""
    products = [entry for entry in timed(cell).values() if entry.kind == "product" and entry.dtype == dtype]
    columns = zip(*(entry.seconds for entry in products), strict=True)
    return [cell.product_operations / min(column) for column in columns]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One contender in one cell; what could not be measured is none."""

    name: str
    entry: Entry
    seconds: float | None = None
    faster: Interval | None = None
    of_ceiling: Interval | None = None

    def columns(self, patches: int) -> list[str]:
        """Return the row of the cell's table."""
        if self.seconds is None:
            return [self.name, f"{self.entry.status}: {self.entry.reason.replace('|', '/')}", "", "", "", ""]
        share, grown, error = self.of_ceiling, self.entry.growth_bytes, self.entry.relative_l2
        return [
            self.name,
            f"{self.seconds:.3g}",
            str(self.faster or ""),
            f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})" if share else "",
            f"{grown / patches / 1000:.0f}" if grown else "",
            f"{error:.1e}" if error is not None else "",
        ]


def timings(cell: Cell, slow_probe: float) -> list[Timing]:
    """Return every contender of the cell, products left out."""
    kept, runs = kept_rounds(cell, slow_probe), timed(cell)
    samples = {name: [entry.seconds[index] for index in kept] for name, entry in runs.items()}
    base, found = samples.get(BASELINE), []
    for name, entry in cell.entries.items():
        if entry.kind == "product":
            continue
        own, rates = samples.get(name), _rates(cell, entry.dtype)
        floor = [cell.operations / rates[index] for index in kept] if rates else None
        found.append(
            Timing(
                name=name,
                entry=entry,
                seconds=statistics.median(own) if own else None,
                faster=paired(base, own) if own and base else None,
                of_ceiling=paired(floor, own) if own and floor else None,
            )
        )
    return found


def twin(cell: Cell, slow_probe: float) -> Interval | None:
    """Return one contender over itself, in two processes; 1 where the machine was quiet."""
    runs, kept = timed(cell), kept_rounds(cell, slow_probe)
    name = next((name for name in runs if name.endswith(TWIN) and name.removesuffix(TWIN) in runs), None)
    if name is None:
        return None
    over, under = ([runs[each].seconds[at] for at in kept] for each in (name, name.removesuffix(TWIN)))
    return paired(over, under)


def is_void(yardstick: Interval | None) -> bool:
    """Return whether the cell's times are noise: its twins differ, or agree only by being blurred."""
    if yardstick is None:
        return True
    wide = (yardstick.high - yardstick.low) / 2 > WIDEST_TWIN
    return wide or not yardstick.low <= 1.0 <= yardstick.high


def log_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of growth: the median slope over all pairs, on logarithms (Theil and Sen)."""
    points = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True)]
    pairs = itertools.combinations(points, 2)
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs)


def growth(result: Result, series: str) -> dict[str, tuple[int, float, float | None]]:
    """Return by contender the number of sizes, and the exponents of seconds and of memory; 1 is linear."""
    slow_probe = float(str(result.plan["slow_probe"]))
    points: dict[str, list[tuple[int, float, float | None]]] = {}
    for cell in (cell for cell in result.cells.values() if cell.series == series):
        for each in timings(cell, slow_probe):
            if each.seconds is not None:
                point = (cell.patches, each.seconds, each.entry.growth_bytes)
                points.setdefault(each.name, []).append(point)
    found: dict[str, tuple[int, float, float | None]] = {}
    for name, rows in points.items():
        if len(rows) >= LEAST_SIZES:
            sizes, seconds, _ = zip(*rows, strict=True)
            known = [(size, held) for size, _, held in rows if held]
            memory = log_slope(*zip(*known, strict=True)) if len(known) >= LEAST_SIZES else None
            found[name] = (len(rows), log_slope(sizes, seconds), memory)
    return found


def summary(result: Result) -> str:
    """Return everything that the run found."""
    machine, slow_probe = result.machine, float(str(result.plan["slow_probe"]))
    versions = machine["versions"]
    assert isinstance(versions, dict)
    head = (
        f"Plan `{result.plan['name']}`, {machine['threads']} threads of {machine['processors']} processors "
        f"({machine['processor']}), {machine['memory_gib']} GiB; "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}."
    )
    lines = [head, ""]
    for cell in result.cells.values():
        rows = (each.columns(cell.patches) for each in timings(cell, slow_probe))
        circumstances = _circumstances(cell, slow_probe)
        lines += [f"### {cell.workload}", "", circumstances, "", *markdown(COLUMNS, rows), ""]
    for series in sorted({cell.series for cell in result.cells.values()} - {""}):
        grown = [
            (name, str(sizes), f"{seconds:.2f}", "" if memory is None else f"{memory:.2f}")
            for name, (sizes, seconds, memory) in growth(result, series).items()
        ]
        if grown:
            columns = ("contender", "sizes", "exponent of seconds", "exponent of memory")
            lines += [f"### Growth with {series}", "", *markdown(columns, grown), ""]
    for question in result.questions.values():
        lines += answer_table(question)
    return "\n".join(lines)


def _circumstances(cell: Cell, slow_probe: float) -> str:
    yardstick, kept = twin(cell, slow_probe), kept_rounds(cell, slow_probe)
    rates = ", ".join(
        f"{name.removeprefix('product in ')} "
        f"{cell.product_operations / statistics.median(entry.seconds) / 1e9:.0f}"
        for name, entry in timed(cell).items()
        if entry.kind == "product"
    )
    waste = ", ".join(f"{kind} {computed / needed:.2f}" for kind, (computed, needed) in cell.scores.items())
    loads = [each.load for each in cell.rounds]
    noise = "no twin ran" if yardstick is None else f"the twin is at {yardstick} of itself"
    doubt = " **Void: too noisy to distinguish contenders.**" if is_void(yardstick) else ""
    return (
        f"{cell.patches} patches, {cell.operations / 1e9:.0f} GFLOP needed; scores computed over needed: "
        f"{waste}. Products in GFLOP/s: {rates or 'none'}. {len(kept)} of {len(cell.rounds)} rounds count, "
        f"load average {min(loads, default=0.0):.1f} to {max(loads, default=0.0):.1f}, {noise}.{doubt}"
    )


def bounds(whole: Answered, pruned: Answered) -> tuple[float, float]:
    """Return how much sooner a first token could come: at this rate, and at any rate.

    At this rate prefill shrinks with the prompt and pruning costs nothing; at any rate there is no prefill.
    """
    share = pruned.prompt_tokens / whole.prompt_tokens
    pairs = list(zip(whole.column("first_token"), whole.column("prefill"), strict=True))
    allowed = statistics.median(first / (first - read + read * share) for first, read in pairs)
    return allowed, statistics.median(first / (first - read) for first, read in pairs)


def answer_table(cell: QuestionCell) -> Iterator[str]:
    """Return a question at every rate against no pruning, which comes first; rounds are paired."""
    whole = cell.answers[0]
    about = (
        f"{cell.frames} frames of {cell.side}x{cell.side}, {whole.visual_tokens} video tokens "
        f"before pruning, {cell.new_tokens} tokens of answer, {len(whole.rounds)} rounds; "
        "seconds are medians. Allowed at a rate is what would come of a prefill that shrinks with the "
        "prompt and a pruning that costs nothing; at any rate, of no prefill at all."
    )
    rows = (
        (
            f"{pruned.rate:.0%}",
            str(pruned.prompt_tokens),
            *(f"{statistics.median(pruned.column(*stages)):.3g}" for stages in STAGES),
            str(paired(whole.column("first_token"), pruned.column("first_token"))),
            *(f"{bound:.2f}" for bound in bounds(whole, pruned)),
            f"{1 / statistics.median(pruned.column('per_token')):.1f}",
            str(paired(whole.column("per_token"), pruned.column("per_token"))),
        )
        for pruned in cell.answers
    )
    yield from (f"### {cell.question.capitalize()}", "", about, "", *markdown(ANSWERS, rows), "")
