"""`build`: a checkpoint becomes a verified bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlexport.cli.fields import command_of
from vlexport.cli.output import data_is_out, phases, say, show, show_json
from vlexport.errors import RequestError
from vlexport.specs import MediaBounds

if TYPE_CHECKING:
    from vlexport.backends import BuildLimits
    from vlexport.build import Built
    from vlexport.bundle import Verdict
    from vlexport.request import BuildRequest


SOURCE = typer.Argument(help="A local folder, or org/name@revision.")
RECIPE = typer.Option(help="A recipe's name, or the file of a private one.")
QUANTISE = typer.Option(help="int8 stores the weights of blocks as integers of 8 bits.")
PROFILE = typer.Option(help="any, thumbnail, image or video; several as image,video.")
TARGETS = typer.Option(help="GPUs to build for, such as sm89,sm120 (TensorRT for RTX).")

SECONDS = typer.Option(help="Stop the library's build after so long; 0 never (TensorRT).")
MEMORY = typer.Option(help="GiB that the library's build may take; 0 is no limit (TensorRT).")


def register(app: typer.Typer) -> None:
    app.command("build")(command_of(Words, build))


@dataclass(frozen=True, kw_only=True)
class Words:
    """The arguments and options of `build`, and of `plan`, which says what they would come to."""

    source: Annotated[str, SOURCE]
    recipe: Annotated[str | None, RECIPE] = None
    backend: Annotated[str, typer.Option(help="See `vlexport list`.")] = "onnxruntime"
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    quantise: Annotated[str | None, QUANTISE] = None
    profile: Annotated[str | None, PROFILE] = None
    targets: Annotated[str | None, TARGETS] = None
    min_pixels: Annotated[int | None, typer.Option(help="Smallest image or frame.")] = None
    max_pixels: Annotated[int | None, typer.Option(help="Largest image or frame.")] = None
    max_images: Annotated[int | None, typer.Option(help="Images in one call.")] = None
    max_frames: Annotated[int | None, typer.Option(help="Video frames in one call.")] = None
    build_seconds: Annotated[float | None, SECONDS] = None
    build_memory: Annotated[float | None, MEMORY] = None
    into: Annotated[Path, typer.Option(help="Folder for bundles.")] = Path("engines")
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


def build(words: Words) -> None:
    """Export, build, check and store. The last line of stdout is the bundle's path."""
    from vlexport.build import build_checkpoint

    asked = request_of(words)
    with phases("build") as progress:
        built = build_checkpoint(asked, progress)
    _show(built, as_json=words.json)
    with data_is_out():
        built.require_passed()


def request_of(words: Words) -> BuildRequest:
    """What the words ask for, checked."""
    from vlexport.checkpoint import Checkpoint
    from vlexport.request import request

    sizes = (words.min_pixels, words.max_pixels, words.max_images, words.max_frames)
    return request(
        Checkpoint.open(words.source),
        recipe=words.recipe,
        backend=words.backend,
        dtype=words.dtype,
        quantise=words.quantise,
        profile=bounds(words.profile, sizes),
        into=words.into,
        targets=words.targets.split(",") if words.targets else (),
        limits=limits_of(words.build_seconds, words.build_memory),
    )


def _show(built: Built, *, as_json: bool) -> None:
    """Verdict and path."""
    parity, path = built.bundle.manifest.parity, str(built.bundle.path)
    status = "failed" if parity.status not in ("passed", "not_run") else "cached" if built.cached else "built"
    if as_json:
        verdict = {"status": parity.status, "table": parity.table}
        show_json("build", {"bundle": path, "status": status, "parity": verdict})
    else:
        say(report_of(parity))
        say("already built: nothing to do" if status == "cached" else status)
        if parity.status == "not_run":
            say("never run: `vlexport parity` on its device checks the engine before anything runs it")
        show(path)


def bounds(
    name: str | None, limits: tuple[int | None, int | None, int | None, int | None]
) -> str | MediaBounds | None:
    """A profile's name, or limits; both at once say two things."""
    if all(limit is None for limit in limits):
        return name
    if name is not None:
        raise RequestError("--profile and limits are both given: name a profile or give limits, not both.")
    low, high, images, frames = limits
    return MediaBounds(
        min_pixels=1 if low is None else low,
        max_pixels=2048 * 2048 if high is None else high,
        max_images=4 if images is None else images,
        max_frames=0 if frames is None else frames,
    )


def limits_of(seconds: float | None, gibibytes: float | None) -> BuildLimits | None:
    """What the library's build may take, if anything was said about it."""
    from vlexport.backends import BuildLimits

    given: dict[str, float] = {}
    if seconds is not None:
        given["seconds"] = seconds
    if gibibytes is not None:
        given["gibibytes"] = gibibytes
    return BuildLimits(**given) if given else None


def report_of(verdict: Verdict) -> str:
    """The accuracy table of a manifest, for people."""
    from vlexport.parity.report import ParityReport

    return ParityReport.from_json(verdict.table).table()
