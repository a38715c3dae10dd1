"""The accuracy check with L4: answers to questions from the engine's embeddings and from the reference's.

Both meet the same decoder. It is fed the reference's answer token by token, and log-probabilities and the
chosen tokens are compared there; an answer that differs is generated, and compared with the task's. What a
precision costs by itself is measured the same way, with the reference in that precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlexport._build.spec import BuildSpec
from vlexport.backends import Engine, Progress, log_progress
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.evaluate.evaluator import Evaluator, ForcedAnswer
from vlexport.evaluate.own import samples_of
from vlexport.evaluate.tasks import Question, questions_of
from vlexport.parity import check as parity
from vlexport.parity.noise import in_dtype, quantized_reference, steady_arithmetic
from vlexport.parity.pixels import reference_of
from vlexport.parity.report import ParityReport, Row
from vlexport.runtime.decoder import DecoderOptions, language_of, no_language
from vlexport.runtime.generate import AnswerGenerator
from vlexport.runtime.opening import recipe_of
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import EncoderInput, Generation, Request, RequestState
from vlexport.specs import MediaItem

if TYPE_CHECKING:
    from vlexport.runtime.pipeline import Sources

MIN_POSITIONS = 200
MAX_NEW_TOKENS = 32
Run = Callable[[Sequence[MediaItem]], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLimits:
    """The most that answers may differ: divergence in nats, changed tokens, and percentage points lost."""

    kl: float
    changed: float
    points: float


ORIGIN = "docs/parity.md, Answers (L4)"
LIMITS = {
    "float32": AnswerLimits(kl=1e-6, changed=0.001, points=0.5),
    "float16": AnswerLimits(kl=1e-3, changed=0.01, points=0.5),
    "bfloat16": AnswerLimits(kl=5e-3, changed=0.02, points=0.5),
    "weights": AnswerLimits(kl=5e-3, changed=0.02, points=1.0),
    "activations": AnswerLimits(kl=2e-2, changed=0.04, points=1.0),
}


@dataclass(kw_only=True, slots=True)
class Tally:
    """Questions answered right, divergence by answer token, and tokens that were the same."""

    right: list[bool] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def add(self, right: bool | None, whole: ForcedAnswer, forced: ForcedAnswer) -> None:
        self.right.append(bool(right))
        self.kl.append(whole.divergence(forced))
        self.same += forced.same

    @property
    def percent(self) -> float:
        return 100 * sum(self.right) / len(self.right)


def check(  # noqa: PLR0913  options of a check
    bundle: Bundle | str | Path,
    against: Checkpoint | str | Path | None = None,
    *,
    layers: bool = False,
    task: str | Path | None = None,
    media: Sources = (),
    fps: float | None = None,
    recipe: str | None = None,
    lora: str | Path | None = None,
    progress: Progress = log_progress,
) -> ParityReport:
    """Check a stored bundle again, by default against the checkpoint it was built from.

    media    images and videos of one's own, compared at their own sizes, a row for each
    fps      rate of frames that have none, or at which video files are sampled
    task     file of questions with answers (`vlexport.evaluate.tasks`), answered with both sides' embeddings
    recipe   the file of the private recipe that built the bundle, if one did
    lora     where the adapter of the build is, if it has moved
    """
    check_parity = partial(parity.check, layers=layers, recipe=recipe, lora=lora, progress=progress)
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, verify="lazy")
    built_by = recipe_of(opened, recipe)
    if media:
        check_parity = partial(
            check_parity,
            own=lambda engine: samples_of(media, fps, Pipeline(opened, engine, built_by).preprocess),
        )
    if task is None:
        return check_parity(opened, against)
    questions = questions_of(task)
    if built_by.language is None:
        raise UnsupportedError(no_language(built_by))

    def answers(engine: Engine, subject: BuildSpec) -> list[Row]:
        language = language_of(built_by, subject.checkpoint, DecoderOptions())
        return answer_rows(Pipeline(opened, engine, built_by, language), subject, questions, progress)

    return check_parity(opened, against, answers=answers)


def answer_rows(
    pipeline: Pipeline, subject: BuildSpec, questions: Sequence[Question], progress: Progress = log_progress
) -> list[Row]:
    """Answer questions with both."""
    steps = pipeline.require_generator()
    with steady_arithmetic():
        sides: dict[str, Run] = {"reference": reference_of(subject).run}
        if subject.quantisation is not None:
            sides["rounded"] = quantized_reference(subject).run
        elif subject.dtype != "float32":
            rounded = reference_of(subject)
            sides["rounded"] = lambda items: in_dtype(rounded, items, subject.dtype)
        tallies = {name: Tally() for name in (*sides, "engine")}
        for number, question in enumerate(questions):
            progress(f"answer {number + 1} of {len(questions)}", number / len(questions))
            compare(steps, question, sides, tallies)
    return _rows(subject, tallies)


def compare(
    steps: AnswerGenerator, question: Question, sides: dict[str, Run], tallies: dict[str, Tally]
) -> None:
    """Answer a question with the embeddings of each side; a tally of another name is the engine's."""
    request = Request(
        prompt=question.prompt,
        images=[question.image] if question.image else [],
        videos=[question.video] if question.video else [],
        fps=question.fps,
        generation=Generation(max_new_tokens=MAX_NEW_TOKENS),
    )

    def state_of(name: str) -> RequestState:
        state = steps.preprocess(request)
        if name in sides:
            state.media = tuple(_with_embeddings(steps, item, sides[name]) for item in state.media)
        return state

    evaluator = Evaluator(steps=steps, truth=steps.completed(state_of("reference")), question=question)

    def judged(name: str) -> tuple[ForcedAnswer, bool | None]:
        state = steps.prefill(steps.prompted(state_of(name)))
        return evaluator.judge(state, again=lambda: state_of(name))

    whole, right = judged("reference")
    tallies["reference"].add(right, whole, whole)
    for name in (side for side in tallies if side != "reference"):
        forced, right = judged(name)
        tallies[name].add(right, whole, forced)


def _with_embeddings(steps: AnswerGenerator, source: EncoderInput, run: Run) -> EncoderInput:
    session = steps.encoder.session
    outputs = {name: rows.float() for name, rows in run([source.item]).items()}
    encoded: list[Encoded] = session.split([source.item], outputs)
    return replace(source, key=None, encoded=encoded[0])


def _rows(subject: BuildSpec, tallies: dict[str, Tally]) -> list[Row]:
    quantisation = subject.quantisation
    name, precision = subject.dtype, subject.dtype
    if quantisation is not None:
        precision = quantisation.name
        name = "weights" if quantisation.activations is None else "activations"
    limits, engine, truth = LIMITS[name], tallies["engine"], tallies["reference"]
    kl_P, answers = torch.cat(engine.kl), f"{len(engine.same)} answer tokens"
    right = f"reference {truth.percent:.2f} %, engine {engine.percent:.2f} %"
    divergence = f"mean KL {kl_P.mean():.2g} nats, 99th percentile {kl_P.quantile(0.99):.2g}"
    if rounded := tallies.get("rounded"):
        right += f", reference in {precision} {rounded.percent:.2f} %"
        divergence += f"; of the reference in {precision} {torch.cat(rounded.kl).mean():.2g}"
    changed = engine.same.count(False)

    def row(check: str, shapes: str, note: str, **metric: tuple[float, float]) -> Row:
        return Row(
            level="L4",
            check=check,
            shapes=shapes,
            metrics={name: value for name, (value, _) in metric.items()},
            limits={name: limit for name, (_, limit) in metric.items()},
            origin=ORIGIN,
            note=note,
            given="observed" if len(kl_P) < MIN_POSITIONS else None,
        )

    lost, questions = truth.percent - engine.percent, f"{len(engine.right)} questions"
    return [
        row("answers right", questions, right, points_lost=(lost, limits.points)),
        row("log-probabilities", answers, divergence, kl=(float(kl_P.mean()), limits.kl)),
        row("tokens", answers, f"{changed} changed", changed=(changed / len(kl_P), limits.changed)),
    ]
