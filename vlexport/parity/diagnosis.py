"""Diagnosis of a wrong tower: every stage on the reference's input, then probes of the first bad one.

Equal rows make order, masks and positions invisible; one window makes masks invisible; one changed cell shows
who attends to whom; a tiny change of all rows shows rounding that should not be there.   N patches, C width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlexport._build.spec import BuildSpec
from vlexport.parity.blocks import (
    BEGIN,
    StageRun,
    Tapped,
    expected_rows,
    forced,
    one_stage,
    running,
    staged,
)
from vlexport.parity.limits import BLOCK_LIMIT, block_limit, block_row, step_of
from vlexport.parity.metrics import Exact, measured
from vlexport.parity.noise import quantized_reference, steady_arithmetic
from vlexport.parity.pixels import reference_of
from vlexport.parity.reference import BlockRows, ExactBlocks
from vlexport.parity.report import LayerCurve, LayerPoint, Row
from vlexport.parity.samples import Sample, random_items
from vlexport.parity.tables import Call, Cell, Segment
from vlexport.recipe import Limit
from vlexport.specs import ShapeProfile

OVERFLOW, ORDER, MASK, TYPE, VALUE = "overflow", "order", "mask", "type", "value"
MEANING = {
    OVERFLOW: "values leave the range of the dtype",
    ORDER: "rows or positions are in the wrong order",
    MASK: "tokens attend to the wrong tokens",
    TYPE: "rounded to a smaller type where it should not be",
    VALUE: "right rows, right tokens, wrong arithmetic or weights",
}
HALF_STEP = 1 / 254
JITTER = 1e-6
# Smooth arithmetic answers a tiny change with one of its size; rounding to 8 or 11 bits with 30 times that.
ROUGH = 12.0
HALF_SQUARE = 255.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The reference's rows at every stage for one sample; `levels` leave the tower after these blocks."""

    sample: Sample
    blocks: BlockRows
    outputs: Mapping[str, Tensor]
    levels: Mapping[str, int]
    exact: ExactBlocks | None = None

    def expected(self, stage: str) -> Tensor:
        rows = expected_rows(stage, self.blocks)
        return self.outputs[stage] if rows is None else rows

    def input_of(self, stage: str) -> Tensor | None:
        if stage == BEGIN:
            return None
        name, _, number = stage.partition(" ")
        if name == "block":
            return self.blocks[int(number)][0]
        return self.blocks[self.levels.get(stage, -1)][1]


def layer_curve(subject: BuildSpec, profile: ShapeProfile, sample: Sample) -> LayerCurve:
    """Return errors of every stage, alone and accumulated, and the cause of the first bad one."""
    flat, single = _flat(sample), _single_window(subject)
    with steady_arithmetic():
        exact = subject.quantisation is None
        reference = reference_of(subject) if exact else quantized_reference(subject)
        levels = staged(subject.tower()).levels
        calls = [(probe, *reference.blocks(probe.items)) for probe in (sample, flat, single)]
        wide = ExactBlocks(subject, [probe for probe, _, _ in calls]) if subject.is_exact else None
        readings = [
            Reading(sample=probe, blocks=blocks, outputs=outputs, levels=levels, exact=wide)
            for probe, outputs, blocks in calls
        ]
        del reference
    main = readings[0]
    stages = forced(subject, profile, [sample], {sample.name: main.blocks})
    own = {stage: _judged(subject, main, stage, rows) for _, stage, rows in stages}
    drift = _drift(subject, profile, main)
    points = tuple(
        LayerPoint(
            stage=stage,
            own=row.metrics.get("relative_l2", math.nan),
            drift=drift.get(stage),
            worst_token=row.metrics.get("worst_token", math.nan),
        )
        for stage, row in own.items()
    )
    bad = next((stage for stage, row in own.items() if row.verdict != "passed"), None)
    cause = "" if bad is None else _Probe(subject, profile, bad).cause(readings)
    meaning = f"{cause}: {MEANING[cause]}" if cause else ""
    return LayerCurve(shapes=sample.name, points=points, first_bad=bad, cause=meaning)


def _judged(subject: BuildSpec, reading: Reading, stage: str, rows: Tensor) -> Row:
    """Return the row of a stage: within its limit, or within 5 times what the reference's float32 loses."""

    def wide() -> Exact | None:
        return reading.exact.after(reading.sample.name, stage) if reading.exact else None

    return block_row(stage, reading.sample.name, (rows, reading.expected(stage)), wide, _limit(subject))


def _drift(subject: BuildSpec, profile: ShapeProfile, reading: Reading) -> dict[str, float | None]:
    with running(subject, profile, Tapped(subject.tower()), {}) as run:
        taps = run(reading.sample, {})
    return {
        stage: metrics.relative_l2 if (metrics := measured(rows, reading.expected(stage))) else math.nan
        for stage, rows in taps.items()
    }


def _limit(subject: BuildSpec) -> Limit:
    # Where kernels round to integers, rows on the border between two go either way.
    return block_limit(HALF_STEP if subject.quantisation else step_of(subject), BLOCK_LIMIT.origin)


def _flat(sample: Sample) -> Sample:
    row_C = sample.items[0].patches[:1]
    items = tuple(replace(item, patches=row_C.repeat(len(item.patches), 1)) for item in sample.items)
    return Sample(name="flat", items=items)


def _single_window(subject: BuildSpec) -> Sample:
    packing = subject.packing
    sides = [math.isqrt(kind.largest) for kind in packing.segmentations if kind.largest]
    side = packing.merge * next(iter(sides), 4)
    items = random_items(subject.recipe, subject.config, [("image", (1, side, side))], seed=7)
    return Sample(name="one window", items=items)


class _Probe:
    """Questions to one stage of our tower, through the same backend."""

    def __init__(self, subject: BuildSpec, profile: ShapeProfile, stage: str) -> None:
        self.subject, self.profile, self.stage = subject, profile, stage

    def cause(self, readings: Sequence[Reading]) -> str:
        main, flat, single = readings
        width = main.blocks[0][0].shape[-1]
        with one_stage(self.subject, self.profile, self.stage, width) as run:
            out = run(main.sample, main.input_of(self.stage))
            if self._overflows(out, main):
                return OVERFLOW
            if self._is_shuffled(out, main.expected(self.stage)):
                return ORDER
            if self._bad(run, flat):
                return TYPE if self._is_rough(run, main) else VALUE
            if self._bad(run, single):
                # Rows of one window all see each other: if they do here too, their places are wrong.
                return self._from_reach(run, single, otherwise=ORDER)
            return self._from_reach(run, main, otherwise=MASK)

    def _bad(self, run: StageRun, reading: Reading) -> bool:
        rows = run(reading.sample, reading.input_of(self.stage))
        return _judged(self.subject, reading, self.stage, rows).verdict != "passed"

    def _is_shuffled(self, out: Tensor, expected: Tensor) -> bool:
        nearest = torch.cdist(out.double(), expected.double()).argmin(1)
        metrics, limit = measured(out, expected[nearest]), _limit(self.subject)
        return metrics is not None and (
            metrics.relative_l2 <= limit.relative_l2 and metrics.worst_token <= limit.worst_token
        )

    def _overflows(self, out: Tensor, main: Reading) -> bool:
        """Return whether values are not finite, stuck at a largest one, or have squares beyond float16."""
        expected = main.expected(self.stage)
        if not bool(torch.isfinite(out).all()):
            return True
        peak = out.abs().max()
        stuck = int((out.abs() == peak).sum()) > 2 and bool(peak < 0.99 * expected.abs().max())
        rows = main.input_of(self.stage)
        largest = 0.0 if rows is None else float(rows.abs().max())
        return stuck or (self.subject.dtype == "float16" and largest > HALF_SQUARE)

    def _is_rough(self, run: StageRun, main: Reading) -> bool:
        """Return whether a tiny change of the input gives a much larger one: something rounds."""
        rows = main.input_of(self.stage)
        if rows is None:
            rows = torch.cat([item.patches for item in main.sample.items])
            if rows.dtype == torch.uint8:
                return False  # no change of a byte is tiny
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(rows.shape, generator=generator) * rows.abs() * JITTER
        if self.stage == BEGIN:
            before, after = run(main.sample, None), run(_with_patches(main.sample, rows + noise), None)
        else:
            before, after = run(main.sample, rows), run(main.sample, rows + noise)
        answer = float((after - before).double().norm() / before.double().norm())
        return answer > ROUGH * JITTER

    def _from_reach(self, run: StageRun, main: Reading, *, otherwise: str) -> str:
        """Change one cell, see which cells answer, and compare with its window and its frame."""
        rows = main.input_of(self.stage)
        packing = self.subject.packing
        if rows is None or packing.queried or not self.stage.startswith("block"):
            return ORDER
        call, unit = Call.of_blocks(main.sample.items, packing), packing.unit
        before, cells = run(main.sample, rows), call.cells()
        legal = [segments for kind in packing.segmentations if (segments := call.segments(kind))]
        for place in range(0, len(cells), max(1, len(cells) // 8)):
            changed = rows.clone()
            changed[place * unit : (place + 1) * unit] *= -1.0
            moved = (run(main.sample, changed) - before).abs().amax(-1).unflatten(0, (-1, unit)).amax(-1)
            answered = {cells[index] for index in torch.nonzero(moved > 0).flatten().tolist()}
            groups = [next(group for group in kind if cells[place] in group) for kind in legal]
            if answered not in groups:
                return _order_or_mask(answered, cells[place], groups)
        return otherwise


def _order_or_mask(answered: set[Cell], changed: Cell, groups: Sequence[Segment]) -> str:
    """Return order if as many others answer as should but not those, mask if more or fewer."""
    others = len(answered - {changed})
    return ORDER if any(others in (len(group) - 1, len(group)) for group in groups) else MASK


def _with_patches(sample: Sample, patches: Tensor) -> Sample:
    parts = patches.split([len(item.patches) for item in sample.items])
    items = tuple(replace(item, patches=part) for item, part in zip(sample.items, parts, strict=True))
    return Sample(name=sample.name, items=items)
