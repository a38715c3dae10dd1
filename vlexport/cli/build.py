"""`build`: export a checkpoint's vision tower, build an engine, check and store the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlexport.cli.options import BACKEND, BUNDLES_DIR, JSON, dtype_name
from vlexport.cli.output import data_is_out, phases, say, show, show_json
from vlexport.errors import RequestError
from vlexport.specs import MediaBounds

if TYPE_CHECKING:
    from vlexport._build import Built
    from vlexport.bundle import Verdict

# `plan` has the same options.
CHECKPOINT = typer.Argument(metavar="CHECKPOINT", help="Local directory, or org/name@revision on the Hub.")
RECIPE = typer.Option(
    None, metavar="RECIPE", help="Recipe name, or the file of a private recipe (default: by model type)."
)
DTYPE = typer.Option(
    "float32", metavar="DTYPE", callback=dtype_name, help="float32, bfloat16 or float16 (fp32, bf16, fp16)."
)
QUANTIZE = typer.Option(None, metavar="SCHEME", help="Quantize the weights of the blocks: int8.")
PROFILE = typer.Option(
    None,
    metavar="PROFILE",
    help="Shape profile: any, thumbnail, image or video; several as image,video (default: the recipe's).",
)
TARGETS = typer.Option(
    None, metavar="GPUS", help="Compute capabilities to build for, e.g. sm89,sm120 (tensorrt_rtx)."
)
MIN_PIXELS = typer.Option(None, metavar="N", help="Minimum pixels of an image or frame (default: 1).")
MAX_PIXELS = typer.Option(None, metavar="N", help="Maximum pixels of an image or frame (default: 2048x2048).")
MAX_IMAGES = typer.Option(None, metavar="N", help="Maximum images per call (default: 4).")
MAX_FRAMES = typer.Option(None, metavar="N", help="Maximum video frames per call (default: 0).")
BUILD_SECONDS = typer.Option(None, metavar="S", help="Build timeout in seconds (0: no limit; TensorRT).")
BUILD_MEMORY = typer.Option(None, metavar="GIB", help="Build memory limit in GiB (0: no limit; TensorRT).")


def register(app: typer.Typer) -> None:
    app.command()(build)


def build(
    checkpoint: str = CHECKPOINT,
    recipe: str = RECIPE,
    backend: str = BACKEND,
    dtype: str = DTYPE,
    quantize: str = QUANTIZE,
    profile: str = PROFILE,
    targets: str = TARGETS,
    min_pixels: int = MIN_PIXELS,
    max_pixels: int = MAX_PIXELS,
    max_images: int = MAX_IMAGES,
    max_frames: int = MAX_FRAMES,
    build_seconds: float = BUILD_SECONDS,
    build_memory: float = BUILD_MEMORY,
    output_dir: Path = BUNDLES_DIR,
    as_json: bool = JSON,
) -> None:
    """Export, build, check and store an engine bundle.

    The last line of stdout is the path of the bundle.
    """
    from vlexport._build import build_checkpoint
    from vlexport.request import request

    sizes = (min_pixels, max_pixels, max_images, max_frames)
    limits = (build_seconds, build_memory)
    choices = choices_of(recipe, backend, dtype, quantize, profile, sizes, targets, limits)
    with phases("build") as progress:
        built = build_checkpoint(request(checkpoint, **choices, into=output_dir, progress=progress), progress)
    _show(built, as_json=as_json)
    with data_is_out():
        built.require_passed()


def choices_of(
    recipe: str | None,
    backend: str,
    dtype: str,
    quantize: str | None,
    profile: str | None,
    sizes: tuple[int | None, int | None, int | None, int | None],
    targets: str | None,
    limits: tuple[float | None, float | None],
) -> dict[str, Any]:
    """Return the arguments of `request` that the options stand for."""
    from vlexport.backends import BuildLimits

    named = zip(("seconds", "gibibytes"), limits, strict=True)
    given = {name: value for name, value in named if value is not None}
    return {
        "recipe": recipe,
        "backend": backend,
        "dtype": dtype,
        "quantise": quantize,
        "profile": bounds(profile, sizes),
        "targets": targets.split(",") if targets else (),
        "limits": BuildLimits(**given) if given else None,
    }


def _show(built: Built, *, as_json: bool) -> None:
    """Print the verdict and the path."""
    parity, path = built.bundle.verdict, str(built.bundle.path)
    status = "failed" if not built.is_good else "cached" if built.cached else "built"
    if as_json:
        verdict = {"status": parity.status, "table": parity.table}
        show_json("build", {"bundle": path, "status": status, "parity": verdict})
    else:
        say(report_of(parity))
        say("already built: nothing to do" if status == "cached" else status)
        if parity.status == "not_run" and built.is_good:
            say("not checked: run `vlexport parity` on the target device before the bundle is used")
        show(path)


def bounds(
    name: str | None, limits: tuple[int | None, int | None, int | None, int | None]
) -> str | MediaBounds | None:
    """Return the profile's name or custom bounds; refuse both at once."""
    if all(limit is None for limit in limits):
        return name
    if name is not None:
        raise RequestError(
            "--profile given together with --min-pixels, --max-pixels, --max-images or --max-frames; "
            "expected a profile or bounds. Leave one of them out."
        )
    low, high, images, frames = limits
    return MediaBounds(
        min_pixels=1 if low is None else low,
        max_pixels=2048 * 2048 if high is None else high,
        max_images=4 if images is None else images,
        max_frames=0 if frames is None else frames,
    )


def report_of(verdict: Verdict) -> str:
    """Return the accuracy table of a manifest as text."""
    from vlexport.parity.report import ParityReport

    return ParityReport.from_json(verdict.table).table()
