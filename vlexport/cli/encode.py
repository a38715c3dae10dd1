"""`encode`: run images and videos through a bundle and store the embeddings as safetensors."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli import options
from vlexport.cli.output import say, show, show_json
from vlexport.errors import VlexportError


def register(app: typer.Typer) -> None:
    app.command()(encode)


def encode(
    bundle: Path = options.BUNDLE,
    output: Path = typer.Option(
        ..., "--output", "-o", metavar="FILE", help="File for the embeddings, *.safetensors."
    ),
    image: list[Path] = options.IMAGES,
    video: list[Path] = options.VIDEOS,
    fps: float = options.FPS,
    prune: float = options.PRUNE,
    trust: str = options.TRUST,
    allow_failed: bool = options.ALLOW_FAILED,
    recipe: str = options.RECIPE_FILE,
    threads: int = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Encode images and videos into embeddings.

    Tensors are named image.N.embeds, image.N.grid, video.N.embeds and video.N.grid. Items that cannot be
    encoded are reported and left out; the exit code is that of the first one.
    """
    from vlexport.backends import Options
    from vlexport.runtime.outputs import check_out, save
    from vlexport.runtime.pipeline import load

    check_out(output)
    opened = load(
        bundle, trust=trust, allow_failed=allow_failed, recipe=recipe, options=Options(threads=threads)
    )
    with opened as pipeline:
        outcomes = pipeline.encode_all(images=image, videos=video, fps=fps, prune=prune)
    names = [*(f"image.{at}" for at in range(len(image))), *(f"video.{at}" for at in range(len(video)))]
    found = dict(zip(names, outcomes, strict=True))
    errors = {name: each for name, each in found.items() if isinstance(each, VlexportError)}
    items = {name: each for name, each in found.items() if not isinstance(each, VlexportError)}
    for name, each in list(errors.items())[0 if items else 1 :]:
        say(f"vlexport: {name}: {each}")
    first = next(iter(errors.values()), None)
    if first and not items:
        raise first
    shapes = save(items, output)
    if as_json:
        failed = {
            name: {"type": type(each).__name__, "message": str(each), "exit_code": each.exit_code}
            for name, each in errors.items()
        }
        show_json("encode", {"out": str(output), "tensors": shapes, "failed": failed})
    else:
        for name, shape in shapes.items():
            say(f"{name} {shape}")
        show(str(output))
    if first:
        raise typer.Exit(first.exit_code)
