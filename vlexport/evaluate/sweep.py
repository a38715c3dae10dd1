"""Pruning rates and selectors side by side: accuracy on a task, or agreement with the un-pruned answer.

Every question is answered without pruning first. Then each selector prunes its video at each rate, to the
same number of tokens, and the decoder is fed the first answer token by token: its logits there are compared
with the un-pruned ones. An answer that differs is generated too, and compared with the task's.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F

from vlexport.backends import Options, Progress
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.codec import checked
from vlexport.errors import RequestError, VlexportError
from vlexport.evaluate.baselines import BASELINES
from vlexport.evaluate.evaluator import Evaluator, ForcedAnswer
from vlexport.evaluate.tasks import Question, read_task
from vlexport.positions.rules import check_rate
from vlexport.pruning.cells import RULES
from vlexport.pruning.methods import METHODS, REQUESTED
from vlexport.pruning.selectors import Selector
from vlexport.reports.sweep import ALL, IMAGES, VIDEOS, WHOLE, Outcome, Outcomes, Sweep, rows_of
from vlexport.runtime.decoder import DecoderOptions, Language
from vlexport.runtime.generate import AnswerGenerator, RuntimeOptions, Sampler
from vlexport.runtime.opening import checkpoint_of
from vlexport.runtime.outputs import Answer, Encoded, attempt
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.preprocess import read_pixels
from vlexport.runtime.prune import Pruner
from vlexport.runtime.request import Generation, Request, RequestState, many
from vlexport.specs import DeviceName, DtypeName, Pixels
from vlexport.vision.grid_tower import GridPacking

if TYPE_CHECKING:
    from vlexport.runtime.request import VideoSource

RATES = (0.0, 0.3, 0.5, 0.7, 0.9)
SELECTORS = (*METHODS, *BASELINES)
# Those that score rows, with the question or without it.
BY_ROWS = (*REQUESTED, *BASELINES)
PIXELS = tuple(name for name, rule in RULES.items() if rule.is_rated)
# As many tokens by fewer pixels.
RESOLUTION = "resolution"
PROMPT = "Describe what happens in this video."


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is pruned by what: a method of rows or of pixels after the tower, a rule before it, or both."""

    before: str | None = None
    method: str | None = None

    @classmethod
    def of(cls, name: str) -> Self:
        """Read `evs`, `static`, `before:static`, `before:static+evs`, `predicted` or `resolution`."""
        first, _, rest = name.partition(":")
        before, _, method = rest.partition("+")
        if first == "before" and before in RULES and (not method or method in (*METHODS, *PIXELS)):
            return cls(before=before, method=method or None)
        if not rest and name in (*BY_ROWS, *PIXELS, RESOLUTION):
            return cls(method=name)
        if name in RULES:
            return cls(before=name)
        raise RequestError(
            f"selectors: '{name}' given; {', '.join((*BY_ROWS, *PIXELS, RESOLUTION))}, predicted, "
            "before:RULE or before:RULE+METHOD expected."
        )

    @property
    def is_rated(self) -> bool:
        return self.method is not None or RULES[str(self.before)].is_rated

    def options(self, rate: float) -> dict[str, Any]:
        """Return the keywords of `Pipeline.encode`; of both steps the first drops half of the share."""
        options: dict[str, Any] = {}
        if self.before:
            share = rate / 2 if self.method else rate
            options["prune_before"] = f"{self.before}:{share}" if RULES[self.before].is_rated else self.before
        return options | ({"prune": rate, "method": self.method} if self.method else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """What is compared: rates in ascending order from 0, selectors by name, and draws of baselines."""

    rates: Sequence[float] = RATES
    selectors: Sequence[str] = SELECTORS
    seeds: int = 1
    generation: Generation

    def __post_init__(self) -> None:
        rates = tuple(sorted({0.0, *(float(check_rate(rate)) for rate in self.rates)}))
        if not self.selectors:
            raise RequestError(f"selectors: none given, some of {', '.join(SELECTORS)} expected.")
        for name in self.selectors:
            Setting.of(name)
        if len(rates) == 1:
            raise RequestError("rates: none above 0 given, at least one expected, such as 0.5.")
        if checked("seeds", self.seeds, int) < 1:
            raise RequestError(f"seeds: {self.seeds} given, 1 or more expected.")
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "selectors", tuple(dict.fromkeys(self.selectors)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A question to put; without its line of a task file, it has no right answer."""

    name: str
    prompt: str
    kind: str
    source: Any
    fps: float | None
    question: Question | None = None


def sweep(  # noqa: PLR0913  what the command line offers, in one place
    bundle: str | Path | Bundle,
    *,
    checkpoint: str | Path | Checkpoint | Language | None = None,
    task: str | Path | None = None,
    videos: VideoSource | Iterable[VideoSource] = (),
    prompt: str = PROMPT,
    fps: float | None = None,
    rates: Sequence[float] = RATES,
    selectors: Sequence[str] = SELECTORS,
    seeds: int = 1,
    max_new_tokens: int = 32,
    dtype: DtypeName | None = None,
    device: DeviceName = "cpu",
    allow_failed: bool = False,
    recipe: str | None = None,
    threads: int = 0,
    progress: Progress = lambda _phase, _share: None,
) -> Sweep:
    """Return what pruning costs and saves with each selector at each rate.

    task            file of questions with answers (`vlexport.evaluate.tasks`), for accuracy
    videos, prompt  instead of it: one question about each video, for agreement with the un-pruned answer
    fps             as for `Pipeline.encode`; of questions that have none
    rates           shares of video tokens to drop; 0 is always among them
    selectors       methods of pruning, `random` and `uniform`, whichever the bundle was built with; `static`
                    and others by pixels; `before:static` and `predicted` before the tower,
                    `before:static+evs` on both sides; `resolution` for fewer pixels
    seeds           draws of `random` and `uniform`
    max_new_tokens  the longest answer
    checkpoint      has the language model that answers (default: the one that the bundle was built from), in
                    `dtype` (default: as stored) on `device`

    The other arguments are those of `bench`. A question that fails is in no row, and under `failed`.

        results = vlexport.sweep("engines/BUNDLE", task="task.jsonl")
        Path("sweep.svg").write_text(results.svg())
    """
    generation = Generation(max_new_tokens=max_new_tokens)
    plan = SweepPlan(rates=rates, selectors=selectors, seeds=seeds, generation=generation)
    cases = _cases(task, many(videos), prompt, fps)
    progress("open", 0.0)
    if checkpoint is None:
        checkpoint = checkpoint_of(Bundle.open(bundle, verify="lazy"))
    opened = load(
        bundle,
        checkpoint=checkpoint,
        allow_failed=allow_failed,
        recipe=recipe,
        options=Options(threads=threads),
        runtime=RuntimeOptions(decoder=DecoderOptions(dtype=dtype, device=device)),
    )
    outcomes: dict[str, Outcomes | VlexportError] = {}
    with opened as pipeline:
        pipeline.pruner.check(plan.rates[-1])
        runner = Runner(pipeline, plan)
        for number, (name, case) in enumerate(cases.items()):
            progress("questions", number / len(cases))
            outcomes[name] = attempt(runner.outcomes, case)
    return _sweep_of(outcomes, cases, plan, pipeline, None if task is None else str(task))


def _sweep_of(
    outcomes: Mapping[str, Outcomes | VlexportError],
    cases: Mapping[str, Case | VlexportError],
    plan: SweepPlan,
    pipeline: Pipeline,
    task: str | None,
) -> Sweep:
    """Return the rows of the questions that were answered; the error of the first one where none was."""
    failed = {name: error for name, error in outcomes.items() if isinstance(error, VlexportError)}
    good = {name: results for name, results in outcomes.items() if not isinstance(results, VlexportError)}
    if not good:
        raise next(iter(failed.values()))
    answered = [case for case in cases.values() if isinstance(case, Case) and case.name in good]
    are_mixed = len({case.kind for case in answered}) > 1
    categories = [_categories(case, are_mixed) for case in answered]
    own, compiled = pipeline.graphs.selection.selector.name, {*pipeline.graphs.packaged_cells}
    return Sweep(
        bundle=str(pipeline.bundle.path),
        digest=pipeline.bundle.digest,
        task=task,
        seeds=plan.seeds,
        chance=_chance(answered, categories),
        forms={
            name: pipeline.graphs.form if name == own or _rules(name) <= compiled else "eager"
            for name in plan.selectors
        },
        rows=rows_of(list(good.values()), categories),
        failed=failed,
    )


def _rules(name: str) -> set[str]:
    """Return the rules of pixels of a setting, and what in it has no package."""
    setting = Setting.of(name)
    return {part for part in (setting.before, setting.method) if part}


def _cases(
    task: str | Path | None, videos: Sequence[Any], prompt: str, fps: float | None
) -> dict[str, Case | VlexportError]:
    if (task is None) == (not videos):
        sources = "neither a task nor videos" if task is None else "a task and videos"
        raise RequestError(f"{sources} given, one of them expected: task, or videos with prompt.")
    if task is None:
        names = [
            str(video) if isinstance(video, str | Path) else f"video {at}" for at, video in enumerate(videos)
        ]
        return {
            name: Case(name=name, prompt=prompt, kind="video", source=source, fps=fps)
            for name, source in zip(names, videos, strict=True)
        }

    def case(question: Question) -> Case:
        kind, source = question.media
        return Case(
            name=question.id,
            prompt=question.prompt,
            kind=kind,
            source=source,
            fps=fps if question.fps is None else question.fps,
            question=question,
        )

    return {name: attempt(case, question) for name, question in read_task(Path(task)).items()}


def _categories(case: Case, are_mixed: bool) -> list[str]:
    category = case.question.category if case.question else None
    kind = VIDEOS if case.kind == "video" else IMAGES
    return [*([category] if category else []), *([kind] if are_mixed else [])]


def _chance(cases: Sequence[Case], categories: Sequence[Sequence[str]]) -> dict[str, float]:
    groups: dict[str, list[float | None]] = {}
    for case, names in zip(cases, categories, strict=True):
        for name in (ALL, *names):
            groups.setdefault(name, []).append(case.question.chance if case.question else None)
    return {
        name: statistics.fmean(chance for chance in chances if chance)
        for name, chances in sorted(groups.items())
        if None not in chances
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """One question: its encoded media, the seconds that this took, and its answer without pruning.

    outcomes  by kept tokens: a prompt of the same tokens is answered once
    """

    case: Case
    item: Encoded
    seconds: float
    answer: Answer
    whole: ForcedAnswer | None = None
    outcomes: dict[bytes, Outcome] = field(default_factory=dict)


class Runner:
    """Answers questions at all rates with all selectors of a plan."""

    def __init__(self, pipeline: Pipeline, plan: SweepPlan) -> None:
        assert pipeline.language is not None
        self.pipeline = pipeline
        self.plan = plan
        self.language = pipeline.language
        self.sampler = Sampler(plan.generation)
        self._last: object = None
        self._items: dict[object, tuple[Encoded, float]] = {}

    def outcomes(self, case: Case) -> Outcomes:
        item, seconds = self._encoded(case)
        steps, request = self._steps(None), self._request(case, item, 0.0)
        answer = steps.completed(steps.preprocess(request))
        trial = _Trial(case=case, item=item, seconds=seconds, answer=answer)
        outcome, whole = self._judged(trial, steps, request, steps.prompted(steps.preprocess(request)))
        outcomes = {(WHOLE, 0.0): [replace(outcome, first_token=seconds + outcome.first_token)]}
        trial = replace(trial, whole=whole)
        settings = {name: Setting.of(name) for name in self.plan.selectors if name not in BY_ROWS}
        for rate in self.plan.rates[1:]:
            draws = {name: self._draws(name, case) for name in self.plan.selectors if name in BY_ROWS}
            own = int(len(item.embeds) * (1 - rate)) if case.kind == "video" else 0
            pruning = [selector for selector, *_ in draws.values() if item.kind in selector.kinds]
            kept = max((_count(selector, item, rate) for selector in pruning), default=own)
            for name, setting in settings.items():
                key = (name, rate if setting.is_rated else 0.0)
                if key not in outcomes:
                    outcomes[key] = [self._of_pixels(trial, name, setting, rate, kept)]
            for name, selectors in draws.items():
                outcomes[name, rate] = [
                    self._outcome(trial, selector, _rate_for(selector, item, rate, kept))
                    for selector in selectors
                ]
            counts = {
                name: [outcome.kept for outcome in outcomes[name, rate]]
                for name, (selector, *_) in draws.items()
                # A number for each frame may be a few tokens short of it at any rate.
                if item.kind in selector.kinds and not getattr(selector, "by_frame", False)
            }
            assert {count for several in counts.values() for count in several} <= {kept}, (rate, kept, counts)
        return outcomes

    def _encoded(self, case: Case, most: int | None = None, **options: Any) -> tuple[Encoded, float]:
        """Return embeddings and the seconds from file to them; neighbours about one file share them.

        most  tokens that fewer pixels are to give
        """
        file = (case.kind, case.source, case.fps) if isinstance(case.source, str | Path) else None
        if file is None or self._last != file:
            self._last, self._items = file, {}
        key = (most, *sorted(options.items()))
        if key not in self._items:
            started = time.perf_counter()
            limits, source = self.pipeline.options.limits.media, case.source
            if most is not None:
                source = self._smaller(read_pixels(case.kind, source, case.fps, limits), most)
            sources: dict[str, Any] = {f"{case.kind}s": [source]}
            (item,) = self.pipeline.encode(**sources, fps=case.fps, limits=limits, **options)
            item.embeds[:1].cpu()  # waits for a device
            self._items[key] = (item, time.perf_counter() - started)
        return self._items[key]

    def _smaller(self, pixels: Pixels, most: int) -> Pixels:
        """Return frames of a size that gives at most so many tokens, in about their shape."""
        packing = self.pipeline.session.packing
        if not isinstance(packing, GridPacking):
            raise RequestError(f"selectors: {RESOLUTION} given, which is for towers that take any size.")
        frames, height, width = self.pipeline.session.preprocess(pixels).grid
        side = packing.rule.patch * packing.merge
        rows, columns = height // packing.merge, width // packing.merge
        scale = math.sqrt(min(1.0, most / (frames * rows * columns)))
        size = [max(1, int(count * scale)) * side for count in (rows, columns)]
        frames_TCHW = pixels.frames.permute(0, 3, 1, 2).float()
        resized = F.interpolate(frames_TCHW, size, mode="bicubic", antialias=True)
        return replace(pixels, frames=resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1))

    def _of_pixels(self, trial: _Trial, name: str, setting: Setting, rate: float, kept: int) -> Outcome:
        """Return the outcome of a setting that starts from the pixels, with so many tokens of a video."""
        exact = 1 - (kept + 0.5) / len(trial.item.embeds) if kept else rate
        options = {"most": kept} if name == RESOLUTION else setting.options(max(exact, 0.0))
        if name == RESOLUTION and not kept:
            options = {"most": int(len(trial.item.embeds) * (1 - rate))}
        item, seconds = self._encoded(trial.case, **options)
        steps, request = self._steps(None), self._request(trial.case, item, 0.0)
        outcome, _ = self._judged(trial, steps, request, steps.prompted(steps.preprocess(request)))
        # Without a rule before it the tower had all.
        seconds += 0.0 if setting.before or name == RESOLUTION else trial.seconds
        return replace(
            outcome,
            kept=len(item.embeds),
            tokens=len(trial.item.embeds),
            first_token=seconds + outcome.first_token,
            encode=seconds,
        )

    def _draws(self, name: str, case: Case) -> list[Selector]:
        """Return the selector, or one for each seed; baselines choose other places for each question."""
        if name in REQUESTED:
            return [REQUESTED[name]]
        seeds = (random.Random(f"{seed}/{case.name}").getrandbits(62) for seed in range(self.plan.seeds))
        return [BASELINES[name](seed=seed) for seed in seeds]

    def _steps(self, selector: Selector | None) -> AnswerGenerator:
        pipeline, graphs = self.pipeline, self.pipeline.graphs
        if selector is not None and selector != graphs.selection.selector:
            graphs = graphs.pruning_by(selector)
        pruner = Pruner(pipeline.recipe, pipeline.pruner.merge, graphs)
        return AnswerGenerator(pipeline.encoder, pruner, self.language, pipeline.options)

    def _request(self, case: Case, item: Encoded, rate: float) -> Request:
        media: dict[str, Any] = {f"{case.kind}s": [item]}
        return Request(prompt=case.prompt, **media, prune=rate or None, generation=self.plan.generation)

    def _outcome(self, trial: _Trial, selector: Selector, rate: float) -> Outcome:
        steps, request = self._steps(selector), self._request(trial.case, trial.item, rate)
        state = steps.prompted(steps.preprocess(request))
        before, kept = sum(state.seconds.values()), state.encoded[0].kept
        key = b"" if kept is None else kept.cpu().numpy().tobytes()
        if key not in trial.outcomes:
            outcome, _ = self._judged(trial, steps, request, state)
            trial.outcomes[key] = replace(outcome, first_token=outcome.first_token - before)
        stored = trial.outcomes[key]
        return replace(stored, first_token=trial.seconds + before + stored.first_token)

    def _judged(
        self, trial: _Trial, steps: AnswerGenerator, request: Request, state: RequestState
    ) -> tuple[Outcome, ForcedAnswer]:
        state = steps.prefill(state)
        with state.timing("prefill"):
            self.sampler.choose(state.logits)  # waits for a device
        first_token, item = sum(state.seconds.values()), state.encoded[0]
        evaluator = Evaluator(steps=steps, truth=trial.answer, question=trial.case.question)
        forced, right = evaluator.judge(state, again=lambda: steps.preprocess(request))
        top1 = statistics.fmean(forced.same)
        kl = float((trial.whole or forced).divergence(forced).mean())
        counts = item.kind == "video" or item.kept is not None
        outcome = Outcome(
            kept=len(item.embeds) if counts else 0,
            tokens=len(trial.item.embeds) if counts else 0,
            right=None if right is None else float(right),
            top1=top1,
            kl=kl,
            exact=float(top1 == 1),
            first_token=first_token,
            encode=trial.seconds,
        )
        return outcome, forced


def _count(selector: Selector, item: Encoded, rate: float) -> int:
    """Return how many tokens of an item a selector keeps."""
    frames = item.grid[0]
    return selector.retained_count(len(item.embeds) // frames, frames, rate)


def _rate_for(selector: Selector, item: Encoded, rate: float, kept: int) -> float:
    """Return the rate at which a selector keeps so many tokens, where its own rule would keep fewer.

    EVS never keeps less than one frame's worth, VidCom2 one token a frame.
    """
    if _count(selector, item, rate) == kept:
        return rate
    # Half a token more, as counts are cut to whole tokens; never 0, which would switch pruning off.
    return max(1 - (kept + 0.5) / len(item.embeds), sys.float_info.min)
