"""`build`: a checkpoint becomes a verified bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlexport.cli.output import data_is_out, phases, say, show, show_json
from vlexport.errors import RequestError
from vlexport.specs import MediaBounds

if TYPE_CHECKING:
    from vlexport.build import Built
    from vlexport.bundle import Verdict


def register(app: typer.Typer) -> None:
    app.command()(build)


def build(
    source: str = typer.Argument(help="A local folder, or org/name@revision."),
    recipe: str = typer.Option(None, help="A recipe's name, or the file of a private one."),
    backend: str = typer.Option("onnxruntime", help="See `vlexport list`."),
    dtype: str = typer.Option("float32", help="float32, bfloat16 or float16."),
    quantise: str = typer.Option(None, help="int8 stores the weights of blocks as integers of 8 bits."),
    profile: str = typer.Option(None, help="any, thumbnail, image or video; several as image,video."),
    targets: str = typer.Option(None, help="GPUs to build for, such as sm89,sm120 (TensorRT for RTX)."),
    min_pixels: int = typer.Option(None, help="Smallest image or frame."),
    max_pixels: int = typer.Option(None, help="Largest image or frame."),
    max_images: int = typer.Option(None, help="Images in one call."),
    max_frames: int = typer.Option(None, help="Video frames in one call."),
    into: Path = typer.Option(Path("engines"), help="Folder for bundles."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Export, build, check and store. The last line of stdout is the bundle's path."""
    from vlexport.build import build_checkpoint, request
    from vlexport.checkpoint import Checkpoint

    shapes = bounds(profile, (min_pixels, max_pixels, max_images, max_frames))
    asked = request(
        Checkpoint.open(source),
        recipe=recipe,
        backend=backend,
        dtype=dtype,
        quantise=quantise,
        profile=shapes,
        into=into,
        targets=targets.split(",") if targets else (),
    )
    with phases("build") as progress:
        built = build_checkpoint(asked, progress)
    _show(built, as_json=as_json)
    with data_is_out():
        built.require_passed()


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


def report_of(verdict: Verdict) -> str:
    """The accuracy table of a manifest, for people."""
    from vlexport.parity.report import ParityReport

    return ParityReport.from_json(verdict.table).table()
