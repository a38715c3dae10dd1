"""What a page lacks, measured by the functions of the commands that do it one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from vlexport._build.build import store_verdict
from vlexport._build.plan import forecast
from vlexport.backends import Progress
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode, freeze_object
from vlexport.errors import RequestError, VlexportError
from vlexport.evaluate.answers import check
from vlexport.evaluate.bench import bench
from vlexport.evaluate.sweep import PROMPT, RATES, sweep
from vlexport.media import kind_of
from vlexport.parity.check import curve_of, spec_of
from vlexport.parity.report import report_in
from vlexport.recipe import Recipe
from vlexport.reports.overlay import write_sheet
from vlexport.reports.results import Planned, Results, Timed, calls_from, planned_from
from vlexport.reports.sweep import Sweep
from vlexport.runtime.opening import checkpoint_of, recipe_of
from vlexport.runtime.pipeline import load
from vlexport.runtime.request import Generation, Request

T = TypeVar("T")
# Of the picture of kept tokens.
DROPPED = 0.5


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A bundle to measure on files of the user's own, against its checkpoint.

    media     images and videos: each is timed; videos are pruned, and the first one is shown
    by_block  also the drift by block, for which two more engines are built
    """

    bundle: Bundle
    media: Sequence[Path] = ()
    fps: float | None = None
    checkpoint: str | None = None
    recipe: str | None = None
    rounds: int = 11
    rates: Sequence[float] = RATES
    by_block: bool = True

    def complete(self, results: Results, progress: Progress) -> tuple[Bundle, Results]:
        """Return the bundle with its verdict, and results with what was missing, or why it still is."""
        unmet: dict[str, str] = {}

        def measured(title: str, measure: Callable[[], T], known: T) -> T:
            if known:
                return known
            progress(title.lower(), 0.0)
            try:
                return measure()
            except VlexportError as error:
                unmet[title] = str(error)
                return known

        drift = measured("Drift by block", self.drift, None) if self.by_block else None
        bundle = drift or self.bundle
        if "Drift by block" in unmet:
            unmet["Accuracy"] = unmet["Drift by block"]
        # Engines are opened by the verdict, which may be a new one.
        then = replace(self, bundle=bundle)
        timings = measured("Latency", lambda: then.timings(progress), results.timings)
        plan = measured("Padding and memory", then.plan, results.plan)
        swept, overlay = results.sweep, results.overlay
        if bundle.manifest.graphs.selector is not None:
            swept = measured("Pruning", then.sweep, swept)
            overlay = measured("Kept tokens", then.picture, overlay)
        return bundle, replace(results, timings=timings, plan=plan, sweep=swept, overlay=overlay, unmet=unmet)

    @cached_property
    def source(self) -> Checkpoint:
        return checkpoint_of(self.bundle, self.checkpoint)

    @cached_property
    def built_by(self) -> Recipe[Any]:
        return recipe_of(self.bundle, self.recipe)

    def drift(self) -> Bundle | None:
        """Return the bundle with a verdict that has the curve of its stages; check what was not checked."""
        bundle, report = self.bundle, report_in(self.bundle.verdict)
        if report is not None and (report.layers is not None or report.is_whole):
            return None
        if report is None:
            report = check(bundle, self.source if self.checkpoint else None, recipe=self.recipe)
        if not report.is_whole:
            subject = spec_of(bundle, self.built_by, self.source)
            curve = curve_of(subject, subject.profile, bundle.manifest.inputs)
            if curve is None:
                raise RequestError("no call of the check fits the profile. Build with a larger one.")
            report = replace(report, layers=curve)
        stored = store_verdict(bundle, report, self.source, self.recipe)
        if stored is None:
            raise RequestError("the reference has other weights than the bundle. Leave --checkpoint out.")
        return stored

    def timings(self, progress: Progress) -> Sequence[Timed]:
        options: dict[str, Any] = {"checkpoint": self.checkpoint, "fps": self.fps, "rounds": self.rounds}
        calls = bench([self.bundle], self.media, recipe=self.recipe, progress=progress, **options)
        content = encode({"calls": [call.to_json() for call in calls]})
        return sorted(calls_from(freeze_object(content, "bench")), key=lambda call: call.tokens)

    def plan(self) -> Planned:
        planned = forecast(spec_of(self.bundle, self.built_by, self.source))
        return planned_from(freeze_object(encode(planned.to_json()), "plan"))

    def videos(self) -> list[Path]:
        videos = [path for path in self.media if kind_of(path) == "video"]
        if not videos:
            raise RequestError("a video is needed. Name one after the bundle.")
        return videos

    def sweep(self) -> Sweep:
        options: dict[str, Any] = {"videos": self.videos(), "fps": self.fps, "rates": self.rates}
        return sweep(self.bundle, checkpoint=self.source, recipe=self.recipe, **options)

    def picture(self) -> bytes:
        """Return a picture of the tokens of the first video that are kept at a middle rate."""
        request = Request(
            prompt=PROMPT,
            videos=self.videos()[:1],
            fps=self.fps,
            prune=DROPPED,
            generation=Generation(max_new_tokens=1),
        )
        with (
            tempfile.TemporaryDirectory() as folder,
            load(self.bundle, checkpoint=self.source, recipe=self.recipe) as pipeline,
        ):
            picture = Path(folder, "kept.png")
            write_sheet(picture, pipeline.generate(request), request, pipeline)
            return picture.read_bytes()
