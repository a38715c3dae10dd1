"""`encode`: images and videos through a bundle, into a safetensors file."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli.bundles import BUNDLE
from vlexport.cli.output import say, show, show_json


def register(app: typer.Typer) -> None:
    app.command()(encode)


def encode(
    bundle: Path = BUNDLE,
    out: Path = typer.Option(..., help="File to write, *.safetensors."),
    image: list[Path] = typer.Option([], help="PNG, JPEG or WebP; once for each image."),
    video: list[Path] = typer.Option([], help="A .npy of T,H,W,3 frames, or a video file; once for each."),
    fps: float = typer.Option(None, help="Rate of .npy frames; sampling rate of video files."),
    prune: float = typer.Option(None, help="Share of video tokens to drop, 0 to 1."),
    trust: str = typer.Option(None, help="Approve a bundle from elsewhere by its digest."),
    allow_failed: bool = typer.Option(False, "--allow-failed", help="Run a bundle that failed its check."),
    recipe: str = typer.Option(None, help="The file of a private recipe."),
    threads: int = typer.Option(0, help="Threads of the engine; 0 takes what the library takes."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Encode media: tensors image.N.embeds, image.N.grid, video.N.embeds, video.N.grid."""
    from vlexport.backends import Options
    from vlexport.runtime.encoding import check_out, save
    from vlexport.runtime.pipeline import load

    check_out(out)
    opened = load(
        bundle, trust=trust, allow_failed=allow_failed, recipe=recipe, options=Options(threads=threads)
    )
    with opened as pipeline:
        items = pipeline.encode(images=image, videos=video, fps=fps, prune=prune)
    shapes = save(items, out)
    if as_json:
        show_json("encode", {"out": str(out), "tensors": shapes})
        return
    for name, shape in shapes.items():
        say(f"{name} {shape}")
    show(str(out))
