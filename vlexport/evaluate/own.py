"""Images and videos of the user's own, compared at their own sizes, in builds and in later checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vlexport._build.spec import BuildSpec
from vlexport.errors import RequestError
from vlexport.media import MediaLimits, kind_of
from vlexport.parity.report import ParityReport
from vlexport.parity.samples import Sample, require_fit
from vlexport.runtime.preprocess import naming, read_pixels
from vlexport.runtime.request import Source
from vlexport.specs import MediaItem, Pixels

# How the names of such calls begin.
OWN = "own "


def samples_of(
    media: Sequence[Source], fps: float | None, preprocess: Callable[[Pixels], MediaItem]
) -> list[Sample]:
    """Return a call for each image or video, named after its file."""
    limits, calls = MediaLimits(), list[Sample]()
    for number, source in enumerate(media):
        pixels = read_pixels(kind_of(source), source, fps, limits)
        with naming(source):
            item = preprocess(pixels)
        name = Path(source).name if isinstance(source, str | Path) else f"item {number}"
        if any(call.name == OWN + name for call in calls):
            name = f"{name} ({number})"
        calls.append(Sample(name=OWN + name, items=(item,)))
    return calls


def fitting_samples(spec: BuildSpec, media: Sequence[Source], fps: float | None) -> list[Sample]:
    """Return a call for each image or video; refuse what the engine of a build will not take."""
    assert spec.backend is not None
    reason = spec.backend.cannot_run(spec.backend.build_target(spec.options, spec.precision))
    if reason is not None:
        raise RequestError(
            f"files to check given, and the engine cannot run here: {reason}. Leave them out; on its device "
            "`vlexport check --accuracy` takes them."
        )

    return samples_of(
        media, fps, lambda pixels: require_fit(spec, spec.recipe.preprocess(spec.config, pixels))
    )


def by_file(report: ParityReport) -> dict[str, str]:
    """Return a line about the rows of each file, by its name."""
    names = dict.fromkeys(row.shapes for row in report.rows if row.shapes.startswith(OWN))
    parts = {name: tuple(row for row in report.rows if row.shapes == name) for name in names}
    return {name: replace(report, rows=rows, required=("L1",)).summary() for name, rows in parts.items()}
