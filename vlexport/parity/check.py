"""Check an engine against its model, level by level; stop at the first level that fails.

L0 integers exact; L1 structure in float32; L2 the engine's dtype against its own noise; L3 caps and health.
L4, answers to a task, is `vlexport.evaluate.answers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vlexport._build.spec import BuildSpec
from vlexport._build.token_graphs import TokenGraphs, opened_graphs
from vlexport.backends import (
    Engine,
    EngineSpec,
    FunctionRunner,
    Inside,
    Portable,
    Progress,
    inside_of,
    log_progress,
    portable_of,
)
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import ResourceError, UnsupportedError, VlexportError
from vlexport.parity import inputs_exact
from vlexport.parity.blocks import expected_rows, forced, running
from vlexport.parity.canary import Judge, canary_row, sample_row
from vlexport.parity.diagnosis import layer_curve
from vlexport.parity.engine_contents import block_rows, rounding_rows, shows_blocks, unseen, weight_rows
from vlexport.parity.graphs import graph_rows, portable_rows
from vlexport.parity.limits import (
    Answer,
    block_row,
    blocked,
    dtype_rows,
    health_rows,
    nudged,
    settled,
    step_of,
    structure_rows,
)
from vlexport.parity.noise import cap_of, raised
from vlexport.parity.reference import DEEP, ExactBlocks, Outputs, ReferenceOutputs, run_blocks, run_reference
from vlexport.parity.report import WHOLE, LayerCurve, ParityReport, Row, exact_row
from vlexport.parity.samples import (
    MAX_PATCHES,
    MAX_PATCHES_HEAVY,
    Sample,
    SampleRules,
    mixed,
    prepared,
    samples,
    token_symbol,
    tracked,
)
from vlexport.parity.tables import Faults
from vlexport.recipe import Limit, Recipe
from vlexport.runtime.outputs import digest_of
from vlexport.specs import MediaItem, ShapeProfile, TensorSpec
from vlexport.system import give_back, raise_interruption
from vlexport.vision.tower import StagedTower

logger = logging.getLogger(__name__)

LEVELS = ("L0", "L1", "L2", "L3")
OFFLINE = "engine"


def check(  # noqa: PLR0913  options of a check
    bundle: Bundle | str | Path,
    against: Checkpoint | str | Path | None = None,
    *,
    layers: bool = False,
    answers: Callable[[Engine, BuildSpec], Sequence[Row]] | None = None,
    own: Callable[[Engine], Sequence[Sample]] = lambda _: (),
    recipe: str | None = None,
    lora: str | Path | None = None,
    progress: Progress = log_progress,
) -> ParityReport:
    """Check a stored bundle again, by default against the checkpoint it was built from.

    answers  gives the rows of L4, of the open engine; it is not called where another level failed
    own      gives calls of the user's own, which are compared as the drawn ones are
    recipe   the file of the private recipe that built the bundle, if one did
    lora     where the adapter of the build is, if it has moved
    """
    from vlexport.runtime import opening

    if not isinstance(bundle, Bundle):
        bundle = Bundle.open(bundle, verify="lazy")
    manifest, backend = bundle.manifest, opening.stored_backend(bundle)
    built_by = opening.recipe_of(bundle, recipe)
    if against is not None and not isinstance(against, Checkpoint):
        against = Checkpoint.open(against)
    checkpoint = against or opening.checkpoint_of(bundle, lora=lora)
    subject = spec_of(bundle, built_by, checkpoint)
    config = subject.config
    if layers and not isinstance(built_by.outline(config), StagedTower):
        raise UnsupportedError(
            f"layers given for a tower of recipe '{built_by.name}', which is traced whole and has no stages; "
            "a tower with blocks of its own expected. Leave --layers (layers=) out."
        )
    first = inputs_exact.identity_rows(bundle, subject, chosen=against is not None)
    with opening.open_engine(bundle, allow_failed=True) as engine:
        inside = inside_of(backend, bundle)
        graphs = opened_graphs(manifest.graphs, bundle, manifest.outputs[0].dtype)
        portable = portable_of(backend, bundle, manifest.graphs.selector, manifest.graphs.cells)
        run = partial(run_checks, engine, subject, first=first, inside=inside, own=own(engine))
        report = run(graphs=graphs, portable=portable, progress=progress)
        profile, inputs = engine.spec.profile, engine.inputs
        if answers is not None:
            rows = [_not_run("L4", report.rows)] if report.caught_by() else answers(engine, subject)
            report = replace(report, rows=(*report.rows, *rows))
    if layers:
        report = replace(report, layers=curve_of(subject, profile, inputs))
    return report.attached_to(inputs_exact.subject_of(manifest))


def spec_of(bundle: Bundle, built_by: Recipe[Any], checkpoint: Checkpoint) -> BuildSpec:
    """Return a stored bundle as the spec of a build from a checkpoint, without the options of its own."""
    from vlexport.runtime import opening

    manifest, config = bundle.manifest, opening.config_of(bundle, built_by)
    return BuildSpec(
        recipe=built_by,
        config=config,
        checkpoint=checkpoint,
        form=manifest.attention_form,
        precision=opening.precision_of(manifest),
        profile=manifest.profile,
        backend=opening.stored_backend(bundle),
        tensors=built_by.stored_tensors(checkpoint, config),
    )


def run_checks(  # noqa: PLR0913  what a check may be given besides the two sides
    engine: Engine,
    subject: BuildSpec,
    *,
    first: Sequence[Row] = (),
    inside: Inside | None = None,
    graphs: TokenGraphs | None = None,
    portable: Portable | None = None,
    own: Sequence[Sample] = (),
    progress: Progress = log_progress,
    stop: bool = True,
    then: Callable[[Checker], None] | None = None,
) -> ParityReport:
    """Run the levels in order; after one that fails the others are not run, unless `stop` is false.

    then  is given the finished check of an engine that passed

    With its files' contents, the engine's weights and blocks are compared too, and the graphs of pruning and
    positions, in the bundle's own form and as portable files.
    """
    rows = list(first)
    if graphs is not None:
        rows += graph_rows(graphs, engine.outputs[0].dtype)
        if portable is not None:
            rows += portable_rows(portable, graphs.selection.selector, subject.recipe, subject.config)
    climb = Checker(engine, subject, progress, inside, portable, own)
    climb.proves = then is not None
    _climb(climb, climb.integers, rows, stop=stop)
    if not isinstance(subject.recipe.outline(subject.config), StagedTower):
        rows.append(unseen("engine blocks", WHOLE))
    report = ParityReport(rows=tuple(rows), required=_required(subject))
    if then is not None and report.passed:
        then(climb)
    return report


def check_own(
    engine: Engine, subject: BuildSpec, own: Sequence[Sample], progress: Progress = log_progress
) -> ParityReport:
    """Compare calls of the user's own alone, as `run_checks` compares them among the drawn ones."""
    climb = Checker(engine, subject, progress)
    climb.samples, climb.skipped = list(own), []
    climb.exact = ExactBlocks(subject.in_float32(), climb.samples)
    rows: list[Row] = []
    _climb(climb, lambda: inputs_exact.call_rows(subject, own, climb.rules), rows)
    return ParityReport(rows=tuple(rows), required=_required(subject))


def _climb(
    climb: Checker, integers: Callable[[], Iterator[Row]], rows: list[Row], *, stop: bool = True
) -> None:
    steps = (integers, climb.structure, climb.dtype, climb.health)
    for level, step in zip(LEVELS, steps, strict=True):
        if stop and any(row.verdict in ("failed", "blocked") for row in rows):
            rows.append(_not_run(level, rows))
            continue
        rows.extend(step())
        give_back(climb.subject.size)


def _required(subject: BuildSpec) -> tuple[str, ...]:
    return ("L0", "L1", "L3") if subject.is_exact else LEVELS


def curve_of(subject: BuildSpec, profile: ShapeProfile, inputs: tuple[TensorSpec, ...]) -> LayerCurve | None:
    """Return every stage on the largest of the samples; none where no sample fits the profile."""
    rules = SampleRules(
        profile=profile, inputs=inputs, tokens=None, form=subject.form, max_patches=MAX_PATCHES_HEAVY
    )
    fitting = [
        sample for sample in samples(subject.recipe, subject.config, rules) if isinstance(sample, Sample)
    ]
    largest = max(fitting, key=lambda sample: (len(sample.items), sample.num_patches), default=None)
    return None if largest is None else layer_curve(subject, profile, largest)


def diagnosed(
    report: ParityReport, subject: BuildSpec, engine: Engine, progress: Progress = log_progress
) -> ParityReport:
    """Return a failed report with the curve of every stage, where numbers differ and the stages can run."""
    if not {"L1", "L2", "L3"} & set(report.caught_by()):
        return report
    progress("layers", 0.0)
    try:
        curve = curve_of(subject, engine.spec.profile, engine.inputs)
    except (VlexportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise_interruption(error)
        logger.warning("the stages could not be compared one by one: %s", error)
        return report
    return replace(report, layers=curve)


@dataclass(frozen=True, kw_only=True)
class OfflineEngine:
    """The substitute for the engine: its typed program, what the read-back found, and why it does not run."""

    program: nn.Module
    spec: EngineSpec
    proofs: Mapping[str, str]
    reason: str


def check_offline(
    unrun: OfflineEngine,
    subject: BuildSpec,
    graphs: TokenGraphs | None = None,
    progress: Progress = log_progress,
) -> ParityReport:
    """Check the typed program in torch instead of the engine; its kernels never run, so no report passes."""
    with Engine(FunctionRunner(unrun.program), unrun.spec) as engine:
        report = run_checks(engine, replace(subject, backend=None), graphs=graphs, progress=progress)
    read_back = (
        exact_row(
            f"network: {check}",
            [],
            "read back from the parsed network; a build stops where it differs from the program",
            note=proof,
        )
        for check, proof in unrun.proofs.items()
    )
    hidden = unseen("engine weights", "a serialised engine does not show its weights where it cannot run")
    kernels = Row(
        level=OFFLINE,
        check="kernels",
        origin="rows above are of the typed program in torch, not of the engine",
        note=f"{unrun.reason}; `vlexport check --accuracy` on such a device checks the engine itself",
        given="not_run",
    )
    rows = (*report.rows, *read_back, hidden, kernels)
    return replace(report, rows=rows, required=(*report.required, OFFLINE))


class Checker:
    """The levels of one check; outputs of reference and engine are computed once and kept."""

    def __init__(  # noqa: PLR0913  what `run_checks` is given
        self,
        engine: Engine,
        subject: BuildSpec,
        progress: Progress = log_progress,
        inside: Inside | None = None,
        portable: Portable | None = None,
        own: Sequence[Sample] = (),
    ) -> None:
        self.proves, self.is_by_item = False, False
        self.engine, self.subject, self.inside, self.portable = engine, subject, inside, portable
        self.progress = progress
        self.rules = SampleRules(
            profile=engine.spec.profile,
            inputs=engine.inputs,
            tokens=token_symbol(engine.outputs),
            form=subject.form,
            max_patches=MAX_PATCHES_HEAVY if subject.heavy else MAX_PATCHES,
        )
        drawn = list(samples(subject.recipe, subject.config, self.rules))
        # What shapes should show is asked of the drawn ones alone.
        self.drawn = [sample for sample in drawn if isinstance(sample, Sample)]
        self.samples = [*self.drawn, *own]
        self.skipped = [row for row in drawn if isinstance(row, Row)]
        self.exact = ExactBlocks(subject.in_float32(), self.samples)
        self.truths: ReferenceOutputs | None = None
        self.answers: list[Answer] = []

    def integers(self) -> Iterator[Row]:
        self.progress("integers", 0.0)
        subject = self.subject
        refused = "one token more than the profile allows is refused"
        checks: tuple[tuple[str, Callable[[], Faults], str], ...] = (
            ("weights", lambda: inputs_exact.check_weights(subject), "the bytes of the checkpoint's files"),
            ("types", self._types, "angles and statistics of norms are float32"),
            ("profile", lambda: inputs_exact.check_profile(self.engine, subject, self.rules), refused),
        )
        for name, check, origin in checks:
            yield from inputs_exact.fault_rows(inputs_exact.guarded(name, check), origin)
        yield from inputs_exact.call_rows(subject, self.samples, self.rules)
        if self.portable is not None:
            yield inputs_exact.portable_row(self.portable, subject, self.samples)
        yield sample_row(self.drawn, subject.packing.levels)
        if subject.dtype != "float32":
            yield from inputs_exact.overflow_rows(subject, self.samples)
        if self.inside is not None:
            yield from weight_rows(self.inside, subject)
            self.inside.release()
            yield from rounding_rows(self.inside)

    def _types(self) -> Faults:
        subject = self.subject
        if subject.dtype == "float32":
            return {}
        items = self.samples[0].items if self.samples else ()
        return inputs_exact.check_dtypes(subject.tower(), prepared(subject, items))

    def run_samples(self) -> None:
        self.truths = run_reference(self.subject, self.samples, self.progress)
        give_back(self.subject.size)
        # Files that cannot be read are an error, and no difference of numbers.
        self.engine.reopen()
        self.answers = list(self.answers_to(self.samples))
        if self.proves and self.subject.backend and self.subject.backend.by_item:
            self.is_by_item = self._by_item(mixed(self.samples))
        # Blocks are compared in copies of the engine that have weights of their own.
        self.engine.release()
        give_back(self.subject.size)

    def _by_item(self, sample: Sample) -> bool:
        """Return whether rows of each item of a call have the same bits alone and in the other order."""

        def rows(items: Sequence[MediaItem]) -> list[str]:
            outputs, problem = _run(self.engine, prepared(self.subject, items))
            if problem:
                # An item may be below what the profile takes.
                return []
            counts = [self.subject.recipe.num_tokens(self.subject.config, item) for item in items]
            parts = {name: output.split(counts) for name, output in outputs.items()}
            return [digest_of({name: part[at] for name, part in parts.items()}) for at in range(len(items))]

        together, alone = rows(sample.items), [row for item in sample.items for row in rows([item])]
        return bool(together) and together == rows(sample.items[::-1])[::-1] == alone

    def structure(self) -> Iterator[Row]:
        if not self.samples:
            yield blocked("L1", "-", "no shape that could be compared fits the profile")
            return
        self.run_samples()
        assert self.truths is not None
        yield from inputs_exact.constant_rows(self.subject, self.truths.tables)
        limit = self.subject.structure_limit
        answers = self.answers if self.subject.is_exact else list(self._twin(self.samples))
        first = structure_rows(answers, self.truths, limit)
        rows = list(settled(first, self._structure_nearby, self._structure_alone))
        yield from rows
        if self.subject.is_exact:
            yield self._canary(lambda wrong, truths: structure_rows(wrong, truths, limit))
        if not self.truths.blocks and limit is not None and any(_is_widened(row, limit) for row in rows):
            blocks = run_blocks(self.subject, self.samples, self.progress)
            self.truths = replace(self.truths, blocks=blocks)
        yield from self._blocks(self.truths)
        if self.inside is not None:
            self.progress("engine blocks", 0.0)
            yield from block_rows(self.inside, self.subject, self.samples, self.truths.blocks, self.exact)
        yield from self.skipped

    def dtype(self) -> Iterator[Row]:
        subject = self.subject
        if not subject.is_exact and self.truths is not None:
            scheme = subject.quantisation
            cap = cap_of(scheme) if scheme else subject.recipe.limits.get(subject.dtype)
            own = raised if scheme else None
            yield from settled(dtype_rows(self.answers, self.truths, cap, own), self._measured_again)
            yield self._canary(lambda wrong, truths: dtype_rows(wrong, truths, cap, own))

    def _canary(self, judge: Judge) -> Row:
        assert self.truths is not None

        def again(name: str, outputs: Outputs) -> list[Answer]:
            chosen = [sample for sample in self.samples if sample.name == name]
            replayed = copy(self)
            replayed.engine = Engine(FunctionRunner(lambda _: dict(outputs)), self.engine.spec)
            return list(replayed.answers_to(chosen))

        return canary_row(self.truths, self.answers, again, judge)

    def _measured_again(self, name: str) -> list[Row]:
        """Return L2 and L3 of inputs a rounding step from this sample's."""
        sample = next(sample for sample in self.samples if sample.name == name)
        near = nudged(sample, step_of(self.subject))
        truths = run_reference(self.subject, near, self.progress, blocks=False)
        return dtype_rows(list(self.answers_to(near)), truths, None)

    def _structure_alone(self, name: str) -> list[Row]:
        return self._structure_of([sample for sample in self.samples if sample.name == name])

    def _structure_nearby(self, name: str) -> list[Row]:
        """Return L1 of inputs a rounding step from this sample's, against the reference in float64."""
        sample = next(sample for sample in self.samples if sample.name == name)
        return self._structure_of(nudged(sample, step_of(self.subject.in_float32())))

    def _structure_of(self, samples: Sequence[Sample]) -> list[Row]:
        subject = self.subject.in_float32()
        truths = run_reference(subject, samples, self.progress, blocks=False, whole=True)
        answers = self.answers_to(samples) if self.subject.is_exact else self._twin(samples)
        return structure_rows(list(answers), truths, self.subject.structure_limit)

    def health(self) -> Iterator[Row]:
        if self.truths is not None:
            yield from health_rows(self.answers, self.truths)

    def answers_to(self, samples: Sequence[Sample]) -> Iterator[Answer]:
        for sample in tracked(samples, self.progress, "engine"):
            outputs, error = _run(self.engine, prepared(self.subject, sample.items))
            yield Answer(sample=sample.name, digest=sample.digest(), outputs=outputs, error=error)

    def _twin(self, samples: Sequence[Sample]) -> Iterator[Answer]:
        """Yield outputs of the tower in float32: many faults are smaller than the noise of half precision."""
        subject = self.subject.in_float32()
        with running(subject, self.rules.profile, subject.tower(), {}) as run:
            for sample in tracked(samples, self.progress, "float32 twin"):
                yield Answer(sample=sample.name, digest=sample.digest(), outputs=run(sample, {}))

    def _blocks(self, truths: ReferenceOutputs) -> Iterator[Row]:
        if not truths.blocks:
            return
        chosen = [sample for sample in self.samples if sample.name in truths.blocks]
        depth = len(next(iter(truths.blocks.values())))
        subject = self.subject.in_float32()
        if depth <= DEEP or (self.inside is not None and shows_blocks(self.inside, self.subject)):
            # Engines of parts cost more than the build; the stored one is compared with these blocks.
            subject = replace(subject, backend=None)
        stages = forced(subject, self.rules.profile, chosen, truths.blocks)
        for number, (name, stage, rows) in enumerate(stages):
            self.progress("blocks", min(1.0, number / (len(chosen) * (depth + 2))))
            expected = expected_rows(stage, truths.blocks[name])
            pair = (rows, truths.of[name].narrow[stage] if expected is None else expected)
            label = f"{stage} alone" if expected is None else stage
            yield block_row(label, name, pair, partial(self.exact.after, name, stage))


def _run(engine: Engine, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    try:
        return {name: rows.cpu() for name, rows in engine.run(inputs).items()}, ""
    except ResourceError:
        raise
    except (VlexportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise_interruption(error)
        return {}, f"{type(error).__name__}: {error}"[:200]


def _is_widened(row: Row, limit: Limit) -> bool:
    return any(value > getattr(limit, name) for name, value in row.limits.items())


def _not_run(level: str, rows: Sequence[Row]) -> Row:
    broken = next(row for row in rows if row.verdict in ("failed", "blocked"))
    note = f"stopped at {broken.level}: {broken.check} {broken.verdict}"
    return Row(level=level, check="-", note=note, given="not_run")
