"""L1 to L3: outputs against the reference's, with limits from measured noise; doubtful rows are repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlexport._build.spec import BuildSpec
from vlexport.parity.metrics import Exact, Incomparable, Metrics, compare, largest, measured
from vlexport.parity.noise import LARGEST
from vlexport.parity.reference import ReferenceOutput, ReferenceOutputs
from vlexport.parity.report import Row
from vlexport.parity.samples import Sample
from vlexport.recipe import Limit

FLOOR_FACTOR = 5.0
RATIO_L2, RATIO_TOKEN = 1.5, 3.0
HEADROOM_WARNING = 0.25
BLOCK_LIMIT = Limit(
    relative_l2=1e-5,
    worst_token=5e-5,
    origin="one block on the reference's input; a block rounds to about 1e-6",
)
# A block rounds in a smaller type to about its epsilon.
EPSILONS = 4.0
HEALTH = {"nonfinite": 0.0, "zero_rows": 0.0, "collapsed_rows": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An engine's outputs for one sample or why it gave nothing, and the digest of the items it was given."""

    sample: str
    digest: str
    outputs: Mapping[str, Tensor]
    error: str = ""


def structure_rows(answers: Sequence[Answer], truths: ReferenceOutputs, limit: Limit | None) -> list[Row]:
    """Return L1, end to end: every output of every sample in float32."""
    largest = largest_floor(truths)
    rows: list[Row] = []
    for answer in answers:
        truth = truths.of[answer.sample]
        if answer.error:
            rows.append(Row(level="L1", check="run", shapes=answer.sample, note=answer.error, given="failed"))
            continue
        if answer.digest != truth.digest:
            rows.append(blocked("L1", answer.sample, "the two sides were given different inputs"))
            continue
        for name, expected in truth.outputs.items():
            own = (truth.floor or {}).get(name)
            limits = _widened(limit, own or largest.get(name))
            row = compared("L1", name, answer.sample, (answer.outputs.get(name), expected), limits)
            rows.append(_with_noise(row, own) if own else row)
    return [*rows, *_itself(answers, truths)]


def block_limit(step: float, origin: str) -> Limit:
    """Return the limit of a block: that of float32, or four steps of a coarser type."""
    factor = max(1.0, EPSILONS * step / BLOCK_LIMIT.relative_l2)
    sizes = {name: factor * getattr(BLOCK_LIMIT, name) for name in ("relative_l2", "worst_token")}
    return Limit(**sizes, origin=origin)


def block_row(
    stage: str,
    sample: str,
    pair: tuple[Tensor | None, Tensor],
    exact: Callable[[], Exact | None],
    limit: Limit = BLOCK_LIMIT,
) -> Row:
    """Return L1 of a stage on the other side's input; over the limit against `exact`, within its rounding."""
    limits = {"relative_l2": limit.relative_l2, "worst_token": limit.worst_token}
    row = compared("L1", stage, sample, pair, (limits, limit.origin))
    measured = exact() if row.verdict == "failed" and row.metrics else None
    floor = None if measured is None else measured.floor([pair[1]])
    if measured is None or floor is None:
        return row
    row = compared("L1", stage, sample, (pair[0], measured.wide), _widened(limit, floor))
    return _with_noise(row, floor)


def dtype_rows(
    answers: Sequence[Answer],
    truths: ReferenceOutputs,
    cap: Limit | None,
    raised: Callable[[Limit, Metrics], Limit] | None = None,
) -> list[Row]:
    """Return L2, the ratio to what the reference loses too, and L3, the cap of the precision.

    `raised` gives the cap of a call from what the reference loses on it.
    """
    rows: list[Row] = []
    for answer in answers:
        truth = truths.of[answer.sample]
        if answer.digest != truth.digest:
            rows.append(blocked("L2", answer.sample, "the two sides were given different inputs"))
            continue
        for name, expected in truth.outputs.items():
            pair = (answer.outputs.get(name), expected)
            rows.append(_ratio_row(name, answer.sample, pair, truth))
            lost = (truth.dtype_floor or {}).get(name)
            own = raised(cap, lost) if cap and raised and lost else cap
            limits = {} if own is None else {"relative_l2": own.relative_l2, "worst_token": own.worst_token}
            origin = own.origin if own else "no cap"
            rows.append(_with_sqnr(compared("L3", name, answer.sample, pair, (limits, origin))))
    return rows


def health_rows(answers: Sequence[Answer], truths: ReferenceOutputs) -> list[Row]:
    """Return L3: values lost, and how near outputs come to the end of float16; worst over all samples."""
    worst: dict[str, dict[str, float]] = {}
    for answer in answers:
        for name, expected in truths.of[answer.sample].outputs.items():
            actual = answer.outputs.get(name)
            metrics = None if actual is None else measured(actual, expected)
            if metrics is None:
                continue
            row = worst.setdefault(name, {})
            for key in (*HEALTH, "half_share"):
                row[key] = max(row.get(key, 0.0), metrics.values()[key])
    return [
        Row(
            level="L3",
            check=f"{name}, health",
            shapes=f"{len(answers)} samples",
            metrics=metrics,
            limits=HEALTH,
            origin="no row may be lost; peak reported against 65504",
            note=_headroom(metrics["half_share"]),
        )
        for name, metrics in worst.items()
    ]


def blocked(level: str, shapes: str, reason: str) -> Row:
    """Return the row of a comparison that could not be made fairly; it never counts as passed."""
    return Row(level=level, check="inputs", shapes=shapes, note=reason, given="blocked")


def compared(
    level: str,
    check: str,
    shapes: str,
    pair: tuple[Tensor | None, Tensor],
    limit: tuple[Mapping[str, float], str],
) -> Row:
    """Return a row of metrics and limits; what cannot be compared fails with its reason, and never passes."""
    (actual, expected), (limits, origin) = pair, limit
    missing = Incomparable(reason="the output is missing")
    metrics = missing if actual is None else compare(actual, expected)
    row = Row(level=level, check=check, shapes=shapes, limits=limits, origin=origin)
    if isinstance(metrics, Metrics):
        return replace(row, metrics=metrics.values())
    return replace(row, note=metrics.reason, given="blocked" if "itself" in metrics.reason else "failed")


def _with_sqnr(row: Row) -> Row:
    """Add decibels of signal over noise, for people; the cap is on the number as it is."""
    error = row.metrics.get("relative_l2", 0.0)
    if row.note or not error > 0:
        return row
    decibels = -20 * math.log10(error)
    return replace(row, metrics={**row.metrics, "sqnr": decibels}, note=f"SQNR {decibels:.1f} dB")


def _ratio_row(name: str, sample: str, pair: tuple[Tensor | None, Tensor], truth: ReferenceOutput) -> Row:
    floor = (truth.dtype_floor or {}).get(name)
    limits = {"ratio": RATIO_L2, "token_ratio": RATIO_TOKEN}
    if floor is None or not floor.relative_l2 or not floor.worst_token:
        return blocked("L2", sample, "the reference's noise in this precision could not be measured")
    noise = f"{truth.dtype_origin}: {floor.relative_l2:.2g}"
    row = _with_noise(compared("L2", name, sample, pair, (limits, noise)), floor)
    return replace(row, metrics={**row.metrics, **_ratios(row.metrics)}) if row.metrics else row


def _ratios(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the errors of a row as multiples of the noise that it names."""
    return {
        "ratio": metrics["relative_l2"] / metrics["noise"],
        "token_ratio": metrics["worst_token"] / metrics["token_noise"],
    }


def _widened(limit: Limit | None, floor: Metrics | None) -> tuple[dict[str, float], str]:
    if limit is None:
        return {}, "the recipe has no limit for float32"
    if floor is None:
        return {}, "the reference's own noise could not be measured"
    limits = {
        "relative_l2": max(limit.relative_l2, FLOOR_FACTOR * floor.relative_l2),
        "worst_token": max(limit.worst_token, FLOOR_FACTOR * floor.worst_token),
    }
    raised = [name for name, value in limits.items() if value > getattr(limit, name)]
    noise = f"5 x the reference's own rounding ({floor.relative_l2:.2g}, one token {floor.worst_token:.2g})"
    return limits, noise if raised else limit.origin


def _with_noise(row: Row, floor: Metrics) -> Row:
    if not row.metrics:
        return row
    noise = {"noise": floor.relative_l2, "token_noise": floor.worst_token}
    return replace(row, metrics={**row.metrics, **noise})


def largest_floor(truths: ReferenceOutputs) -> dict[str, Metrics]:
    """Return the largest rounding of the reference by output, over all calls where it was measured."""
    floors: dict[str, list[Metrics]] = {}
    for truth in truths.of.values():
        for name, own in (truth.floor or {}).items():
            floors.setdefault(name, []).append(own)
    return {name: most for name, several in floors.items() if (most := largest(several))}


def _itself(answers: Sequence[Answer], truths: ReferenceOutputs) -> Iterator[Row]:
    same = [
        torch.equal(answer.outputs[name], expected)
        for answer in answers
        for name, expected in truths.of[answer.sample].narrow.items()
        if name in answer.outputs
    ]
    if same and all(same):
        yield blocked("L1", "all samples", "equal to the reference bit for bit: compared with itself?")


def _headroom(share: float) -> str:
    return f"peak is {share:.0%} of what float16 can hold" if share > HEADROOM_WARNING else ""


# What one small call loses in half precision is an accident: a step in the last place of its inputs changes
# it. transformers' own bfloat16 on a tower of 32 columns and 4 to 24 tokens a call loses more than 1.5 times
# its own loss in 4 of 100 such pairs. docs/results/noise.md has the measurements behind these numbers.
NUM_NEIGHBOURS = 12
# Over a call and its neighbours, drawn 4,000 times from 33 on 43 calls of two towers, equals failed once; at
# 1.5 a program that loses 1.5 times as much would be found in 22 of 100 checks of one of them, here in 79.
CONFIRMED_RATIO = 1.4
# Among 90,000 pairs of equals the largest was 2.6 times over the limit of calls, 2.1 over that of tokens.
NO_ACCIDENT = 3.0


def step_of(subject: BuildSpec) -> float:
    """Return the relative distance of neighbouring numbers in the subject's precision."""
    if subject.quantisation is not None:
        return 1 / LARGEST
    kind: torch.dtype = getattr(torch, subject.dtype)
    return torch.finfo(kind).eps


def nudged(sample: Sample, step: float) -> list[Sample]:
    """Return the same call some times over, every value of its patches moved by up to one step.

    The step of a byte is 1; a grey level is 0.015, and bfloat16 rounds pixels by up to 0.008.
    """
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            name=f"{sample.name}, neighbour {number}",
            items=tuple(replace(item, patches=moved(item.patches, step, generator)) for item in sample.items),
        )
        for number in range(1, NUM_NEIGHBOURS + 1)
    ]


def moved(rows: Tensor, step: float, generator: torch.Generator) -> Tensor:
    """Return rows with every value moved by up to one step of its precision."""
    if rows.dtype == torch.uint8:
        steps = torch.randint(-1, 2, rows.shape, generator=generator)
        return (rows + steps).clamp(0, 255).to(torch.uint8)
    return rows * (1 + step * (2 * torch.rand(rows.shape, generator=generator) - 1))


def settled(
    rows: Sequence[Row],
    look: Callable[[str], Sequence[Row]],
    alone: Callable[[str], Sequence[Row]] | None = None,
) -> Iterator[Row]:
    """Yield rows, those in doubt measured together with what `look` returns for the sample's neighbours.

    A row of L1 that was compared with float32 is first measured against float64 of its own call, by `alone`.
    After one that fails for certain nothing more is measured: the verdict is final.
    """
    certain = any(_failed(row) and not (_in_doubt(row) or _is_provisional(row)) for row in rows)
    for row in rows:
        result = row
        if alone and not certain and _is_provisional(result):
            result = next((other for other in alone(row.shapes) if _same(other, row)), row)
        if not certain and _in_doubt(result):
            result = _pooled(result, [other for other in look(row.shapes) if _same(other, row)])
        certain = certain or _failed(result)
        yield result


def _failed(row: Row) -> bool:
    return row.level in ("L1", "L2") and row.verdict in ("failed", "blocked")


def _is_provisional(row: Row) -> bool:
    """Return whether a row is over its limit against float32, whose own rounding is not known there."""
    return row.level == "L1" and bool(row.exceeded()) and _is_measured(row) and "noise" not in row.metrics


def _in_doubt(row: Row) -> bool:
    """Return whether a row is over a limit by so little that it may be an accident."""
    noises = (row.metrics.get(name, 0.0) for name in ("noise", "token_noise"))
    over = row.exceeded().items()
    if not _failed(row) or not _is_measured(row) or not over or not all(noises):
        return False
    return all(value <= NO_ACCIDENT * row.limits[name] for name, value in over)


def _is_measured(row: Row) -> bool:
    return (
        row.given is None
        and bool(row.metrics)
        and all(math.isfinite(value) for value in row.metrics.values())
    )


def _same(one: Row, other: Row) -> bool:
    return (one.level, one.check) == (other.level, other.check)


def _pooled(row: Row, neighbours: Sequence[Row]) -> Row:
    """Pool losses of whole calls as root mean square, of tokens as the worst, of both sides alike."""
    lost = next((neighbour for neighbour in neighbours if not _is_measured(neighbour)), None)
    if lost is not None:
        return replace(row, note=f"{lost.shapes}: {lost.note or 'not a number'}")
    every = [row, *neighbours]

    def mean(name: str) -> float:
        return math.sqrt(sum(entry.metrics[name] ** 2 for entry in every) / len(every))

    def worst(name: str) -> float:
        values = [entry.metrics[name] for entry in every]
        return min(values) if name == "min_cosine" else max(values)

    metrics = {name: worst(name) for name in row.metrics}
    metrics["worst_at"] = max(every, key=lambda entry: entry.metrics["worst_token"]).metrics["worst_at"]
    metrics |= {"relative_l2": mean("relative_l2"), "noise": mean("noise")}
    ratios, alone = _ratios(metrics), _ratios(row.metrics)
    if row.level == "L2":
        metrics |= ratios
        limits = {**row.limits, "ratio": CONFIRMED_RATIO}
    else:
        # The least of these limits is the recipe's own, or 5 times a noise that is no larger than the pooled.
        noises = {"relative_l2": metrics["noise"], "worst_token": metrics["token_noise"]}
        least = {name: min(entry.limits[name] for entry in every) for name in noises}
        limits = {name: max(least[name], FLOOR_FACTOR * noise) for name, noise in noises.items()}
    return replace(
        row,
        metrics=metrics,
        limits=limits,
        origin=f"{row.origin}; over {len(every)} inputs a rounding step apart: {metrics['noise']:.2g}",
        note=f"alone {alone['ratio']:.2f} and {alone['token_ratio']:.2f} times the noise, over {len(every)} "
        f"inputs a rounding step apart {ratios['ratio']:.2f} and {ratios['token_ratio']:.2f}",
    )
