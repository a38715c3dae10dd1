"""A run in Markdown: paired ratios, distance to the ceiling, memory, growth; every cell."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import BASELINE, TWIN
from benchmarks.results import Answered, Cell, Entry, QuestionCell, Result
from vlexport.bench import Interval, paired
from vlexport.errors import RequestError

BEGIN = "<!-- measured, written by `python -m benchmarks --page` -->"
END = "<!-- end of measured -->"

# A twin that strays further says that the machine was too noisy to tell contenders apart.
WIDEST_TWIN = 0.05
LEAST_SIZES = 4

HEAD = (
    "| contender | seconds | times as fast as Hugging Face eager | share of the ceiling "
    "| kB per patch | relative L2 |"
)
ANSWERS = (
    "| dropped | prompt tokens | preprocess | tower | prune, positions | prefill | first token, s "
    "| times as soon | allowed at this rate | allowed at any rate | tokens per second | times as fast |"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One contender in one cell; what could not be measured is none."""

    name: str
    entry: Entry
    seconds: float | None = None
    faster: Interval | None = None
    of_ceiling: Interval | None = None


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


def findings(cell: Cell, slow_probe: float) -> list[Finding]:
    """Return every contender of the cell, products left out."""
    kept, runs = kept_rounds(cell, slow_probe), timed(cell)
    found = []
    for name, entry in cell.entries.items():
        if entry.kind != "product":
            own, base = _kept(runs.get(name), kept), _kept(runs.get(BASELINE), kept)
            rates = _rates(cell, entry.dtype)
            floor = [cell.operations / rates[index] for index in kept] if rates else []
            found.append(
                Finding(
                    name=name,
                    entry=entry,
                    seconds=statistics.median(own) if own else None,
                    faster=paired(base, own) if own and base else None,
                    of_ceiling=paired(floor, own) if own and floor else None,
                )
            )
    return found


def _kept(entry: Entry | None, kept: Sequence[int]) -> list[float]:
    return [entry.seconds[index] for index in kept] if entry else []


def twin(cell: Cell, slow_probe: float) -> Interval | None:
    """Return one contender over itself, in two processes; 1 where the machine was quiet."""
    runs, kept = timed(cell), kept_rounds(cell, slow_probe)
    name = next((name for name in runs if name.endswith(TWIN) and name.removesuffix(TWIN) in runs), None)
    return paired(_kept(runs[name], kept), _kept(runs[name.removesuffix(TWIN)], kept)) if name else None


def is_void(yardstick: Interval | None) -> bool:
    """Whether the cell's times are noise: its twins differ, or agree only by being blurred."""
    if yardstick is None:
        return True
    wide = (yardstick.high - yardstick.low) / 2 > WIDEST_TWIN
    return wide or not yardstick.low <= 1.0 <= yardstick.high


def log_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of growth: the median slope over all pairs, on logarithms (Theil and Sen)."""
    points = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True)]
    return statistics.median(
        (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
    )


def growth(result: Result, series: str) -> dict[str, tuple[int, float, float | None]]:
    """Return by contender the number of sizes, and the exponents of seconds and of memory; 1 is linear."""
    slow_probe = float(str(result.plan["slow_probe"]))
    cells = sorted((cell for cell in result.cells.values() if cell.series == series), key=lambda c: c.patches)
    rows: dict[str, list[tuple[int, float, float | None]]] = {}
    for cell in cells:
        for each in findings(cell, slow_probe):
            if each.seconds is not None:
                rows.setdefault(each.name, []).append((cell.patches, each.seconds, each.entry.growth_bytes))
    found = {}
    for name, points in rows.items():
        known = [(patches, held) for patches, _, held in points if held]
        if len(points) >= LEAST_SIZES:
            memory = log_slope(*zip(*known, strict=True)) if len(known) >= LEAST_SIZES else None
            sizes, seconds, _ = zip(*points, strict=True)
            found[name] = (len(points), log_slope(sizes, seconds), memory)
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
        lines += [
            f"### {cell.workload}",
            "",
            _circumstances(cell, slow_probe),
            "",
            HEAD,
            "|---|---|---|---|---|---|",
        ]
        lines += [f"| {each.name} | {_columns(each, cell)} |" for each in findings(cell, slow_probe)]
        lines.append("")
    for series in sorted({cell.series for cell in result.cells.values()} - {""}):
        rows = growth(result, series)
        if rows:
            lines += [f"### Growth with {series}", ""]
            lines += ["| contender | sizes | exponent of seconds | exponent of memory |", "|---|---|---|---|"]
            lines += [
                f"| {name} | {sizes} | {seconds:.2f} | {'' if memory is None else f'{memory:.2f}'} |"
                for name, (sizes, seconds, memory) in rows.items()
            ]
            lines.append("")
    for question in result.questions.values():
        lines += answer_table(question)
    return "\n".join(lines)


def _columns(finding: Finding, cell: Cell) -> str:
    if finding.seconds is None:
        return f"{finding.entry.status}: {finding.entry.reason.replace('|', '/')} | | | | "
    share, grown, error = finding.of_ceiling, finding.entry.growth_bytes, finding.entry.relative_l2
    columns = (
        f"{finding.seconds:.3g}",
        str(finding.faster or ""),
        f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})" if share else "",
        f"{grown / cell.patches / 1000:.0f}" if grown else "",
        f"{error:.1e}" if error is not None else "",
    )
    return " | ".join(columns)


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
    doubt = " **Void: too noisy to tell contenders apart.**" if is_void(yardstick) else ""
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
    reads = whole.column("prefill")
    pairs = [(all_ - read, read) for all_, read in zip(whole.column("first_token"), reads, strict=True)]
    allowed = statistics.median((rest + read) / (rest + read * share) for rest, read in pairs)
    return allowed, statistics.median((rest + read) / rest for rest, read in pairs)


def answer_table(cell: QuestionCell) -> Iterator[str]:
    """Return a question at every rate against no pruning, which comes first; rounds are paired."""
    whole = cell.answers[0]
    yield f"### {cell.question.capitalize()}"
    yield ""
    yield (
        f"{cell.frames} frames of {cell.side}x{cell.side}, {whole.visual_tokens} video tokens "
        f"before pruning, {cell.new_tokens} tokens of answer, {len(whole.rounds)} rounds; "
        "seconds are medians. Allowed at a rate is what would come of a prefill that shrinks with the "
        "prompt and a pruning that costs nothing; at any rate, of no prefill at all."
    )
    yield ""
    yield ANSWERS
    yield "|" + "---|" * ANSWERS.count(" | ") + "---|"
    for pruned in cell.answers:
        allowed, ceiling = bounds(whole, pruned)
        stages = (("preprocess",), ("tower",), ("prune", "positions"), ("prefill",), ("first_token",))
        columns = (
            f"{pruned.rate:.0%}",
            str(pruned.prompt_tokens),
            *(
                f"{statistics.median(map(sum, zip(*map(pruned.column, each), strict=True))):.3g}"
                for each in stages
            ),
            str(paired(whole.column("first_token"), pruned.column("first_token"))),
            f"{allowed:.2f}",
            f"{ceiling:.2f}",
            f"{1 / statistics.median(pruned.column('per_token')):.1f}",
            str(paired(whole.column("per_token"), pruned.column("per_token"))),
        )
        yield f"| {' | '.join(columns)} |"
    yield ""


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of a page."""
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise RequestError(f"{page}: no place for the results; expected a line '{begin}' and a line '{end}'.")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")
