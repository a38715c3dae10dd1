"""A run in Markdown: goals, paired ratios, distance to the floor, memory, growth; every cell."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.plans import BASELINE, TWIN
from benchmarks.results import Answered, Cell, Entry, QuestionCell, Result
from benchmarks.tables import markdown, marks
from vlexport.evaluate.intervals import Interval, paired

BEGIN, END = marks("measured", "python -m benchmarks --page")

# A twin that strays further shows that the machine was too noisy to distinguish contenders.
WIDEST_TWIN = 0.05
LEAST_SIZES = 4

HALF = "bfloat16"
HALF_BASELINE = f"Hugging Face eager {HALF}"
# Times as fast as Hugging Face's bfloat16; int8 over the best bfloat16; exponent of ONNX Runtime over frames.
LEAST_HALF, LEAST_INT8, MOST_EXPONENT = 1.5, 1.3, 1.06
# The largest frame of a call in patches, and how many times its floor bfloat16 may take; of larger ones none.
FLOORS = ((4096, 1.6), (10_764, 2.0))

COLUMNS = (
    "contender", "seconds", "times as fast as Hugging Face eager", "as Hugging Face bfloat16",
    "as the best bfloat16", "times the floor", "kB per patch", "relative L2",
)  # fmt: skip
GOALS = (
    "workload", "largest frame, patches", f"bfloat16, times as fast as Hugging Face's: {LEAST_HALF} or more",
    f"bfloat16, times the floor: {', '.join(f'{most} to {size:,} patches' for size, most in FLOORS)}",
    f"int8, times as fast as the best bfloat16: {LEAST_INT8} or more",
)  # fmt: skip
GROWTH = (
    "contender", "seconds", "exponent of seconds", "of seconds x speed of the product", "of memory",
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
    """One contender in one cell; what could not be measured is none.

    faster       times as fast as the baseline
    over_half    in less than float32, times as fast as Hugging Face's bfloat16
    over_best    in int8, times as fast as the best bfloat16 of the same round, whoever's it was
    over_floor   times the operations over the speed of the fastest product of this dtype in the same round
    """

    name: str
    entry: Entry
    seconds: float | None = None
    faster: Interval | None = None
    over_half: Interval | None = None
    over_best: Interval | None = None
    over_floor: Interval | None = None

    def columns(self, patches: int) -> list[str]:
        if self.seconds is None:
            reason = f"{self.entry.status}: {self.entry.reason.replace('|', '/')}"
            return [self.name, reason, *[""] * (len(COLUMNS) - 2)]
        grown, error = self.entry.growth_bytes, self.entry.relative_l2
        ratios = (self.over_half, self.over_best, self.over_floor)
        medians = (f"{ratio.median:.2f}" if ratio else "" for ratio in ratios)
        memory = f"{grown / patches / 1000:.0f}" if grown else ""
        exactness = f"{error:.1e}" if error is not None else ""
        return [self.name, f"{self.seconds:.3g}", str(self.faster or ""), *medians, memory, exactness]


def timings(cell: Cell, slow_probe: float) -> list[Timing]:
    """Return every contender of the cell, products left out."""
    kept, runs = kept_rounds(cell, slow_probe), timed(cell)
    samples = {name: [entry.seconds[index] for index in kept] for name, entry in runs.items()}
    halves = [name for name, entry in runs.items() if entry.dtype == HALF and entry.kind != "product"]
    best = [min(column) for column in zip(*(samples[name] for name in halves), strict=True)]

    def faster(base: list[float] | None, name: str) -> Interval | None:
        return paired(base, samples[name]) if base and name in samples else None

    found = []
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
                faster=faster(samples.get(BASELINE), name),
                over_half=faster(samples.get(HALF_BASELINE), name) if entry.dtype != "float32" else None,
                over_best=faster(best, name) if entry.dtype == "int8" else None,
                over_floor=paired(own, floor) if own and floor else None,
            )
        )
    return found


def twin(cell: Cell, slow_probe: float) -> Interval | None:
    """Return one contender over itself, in two processes; 1 where the machine was quiet."""
    pairs = [pair for index in kept_rounds(cell, slow_probe) for pair in cell.rounds[index].twins]
    return paired([other for _, other in pairs], [one for one, _ in pairs]) if pairs else None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Exponents of a contender over the sizes of a series; 1 is linear, none where sizes are missing.

    times   seconds by size, the smallest first
    steady  of seconds x the speed of the product in the same round: a machine that drifts moves both
    """

    times: tuple[float, ...]
    seconds: float
    steady: float | None
    memory: float | None


def growth(result: Result, series: str) -> dict[str, Growth]:
    """Return how contenders grow that were timed at enough sizes."""
    slow_probe = float(str(result.plan["slow_probe"]))
    points: dict[str, list[tuple[float | None, ...]]] = {}
    for cell in (cell for cell in result.cells.values() if cell.series == series):
        for each in timings(cell, slow_probe):
            if each.seconds is not None:
                steady = each.over_floor.median * cell.operations if each.over_floor else None
                point = (cell.patches, each.seconds, steady, each.entry.growth_bytes)
                points.setdefault(each.name, []).append(point)

    def exponent(rows: Sequence[tuple[float | None, ...]], column: int) -> float | None:
        known = [(row[0], row[column]) for row in rows]
        complete = [(size, value) for size, value in known if size and value]
        return log_slope(*zip(*complete, strict=True)) if len(complete) >= LEAST_SIZES else None

    found: dict[str, Growth] = {}
    for name, rows in points.items():
        seconds = exponent(rows, 1)
        if seconds is not None:
            others = {"steady": exponent(rows, 2), "memory": exponent(rows, 3)}
            times = tuple(time for _, time, *_ in sorted(rows, key=lambda row: row[0] or 0) if time)
            found[name] = Growth(times=times, seconds=seconds, **others)
    return found


def goal_table(result: Result) -> Iterator[str]:
    """Return the goals of a run with bfloat16: asked, measured by the best of ours, met or missed."""
    slow_probe = float(str(result.plan["slow_probe"]))
    rows = []
    for cell in result.cells.values():
        ours = [each for each in timings(cell, slow_probe) if each.entry.kind == "ours"]
        halves = [each for each in ours if each.entry.dtype == HALF]
        frame = max(height * width for _, height, width in cell.grids)
        most = next((most for size, most in FLOORS if frame <= size), None)
        found = (
            _best({each.name: each.over_half for each in halves}, least=LEAST_HALF),
            _best({each.name: each.over_floor for each in halves}, most=most),
            _best({each.name: each.over_best for each in ours}, least=LEAST_INT8),
        )
        if any(found):
            void = " (void)" if is_void(twin(cell, slow_probe)) else ""
            rows.append((f"{cell.workload}{void}", f"{frame:,}", *found))
    if rows:
        yield from ("### Goals", "", *markdown(GOALS, rows), "")
    grown = growth(result, "frames").get("onnxruntime float32")
    if rows and grown:
        word = "met" if round(grown.seconds, 2) <= MOST_EXPONENT else "missed"
        steady = "unknown" if grown.steady is None else f"{grown.steady:.2f}"
        judged = f"{word}, {grown.seconds:.2f}; of its seconds x the speed of the product: {steady}."
        yield from (f"Exponent of ONNX Runtime's seconds over frames, {MOST_EXPONENT} at most: {judged}", "")


def _best(
    found: Mapping[str, Interval | None], *, least: float | None = None, most: float | None = None
) -> str:
    """Return the best contender with its ratio, judged by its median; without a goal the ratio alone."""
    known = {name: ratio for name, ratio in found.items() if ratio}
    if not known:
        return ""
    pick = max if least is not None else min
    name = pick(known, key=lambda each: known[each].median)
    median = round(known[name].median, 2)
    is_met = median >= least if least is not None else most is None or median <= most
    word = "no goal" if least is None and most is None else "met" if is_met else "missed"
    return f"{word}: {known[name]}, {name.rsplit(' ', maxsplit=1)[0]}"


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
    lines = [head, "", *goal_table(result)]
    inner = _inner(result)
    for cell in result.cells.values():
        if cell.workload in inner:
            continue
        rows = (
            each.columns(cell.patches) for each in timings(cell, slow_probe) if not each.name.endswith(TWIN)
        )
        circumstances = _circumstances(cell, slow_probe)
        lines += [f"### {cell.workload}", "", circumstances, "", *markdown(COLUMNS, rows), ""]
    for series in sorted({cell.series for cell in result.cells.values()} - {""}):
        grown = []
        for name, each in growth(result, series).items():
            exponents = (each.seconds, each.steady, each.memory)
            slopes = ("" if exponent is None else f"{exponent:.2f}" for exponent in exponents)
            grown.append((name, ", ".join(f"{time:.3g}" for time in each.times), *slopes))
        if grown:
            lines += [f"### Growth with {series}", "", *markdown(GROWTH, grown), ""]
    for question in result.questions.values():
        lines += answer_table(question)
    return "\n".join(lines)


def _inner(result: Result) -> set[str]:
    """Return workloads between the ends of a series that has a table of growth: this shows their times."""
    found = set()
    for series in {cell.series for cell in result.cells.values()} - {""}:
        cells = sorted((c for c in result.cells.values() if c.series == series), key=lambda c: c.patches)
        found |= {cell.workload for cell in cells[1:-1]} if growth(result, series) else set()
    return found


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
    pairs = sum(len(cell.rounds[index].twins) for index in kept)
    noise = "no twin ran" if yardstick is None else f"the twin is at {yardstick} of itself in {pairs} pairs"
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
        f"{cell.frames} frames of {cell.side}x{cell.side}, {whole.visual_tokens} video tokens before "
        f"pruning, {cell.new_tokens} tokens of answer, {len(whole.rounds)} rounds; seconds are medians."
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
