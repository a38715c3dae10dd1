"""`demo`: the whole workflow, offline, on a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli.options import BACKEND, BUNDLES_DIR, JSON
from vlexport.cli.output import phases, show, show_json


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    recipe: str = typer.Option(None, metavar="NAME", help="Built-in recipe (default: the demo's own)."),
    backend: str = BACKEND,
    folder: Path = typer.Option(
        Path("demo-output"), metavar="DIR", help="Directory for checkpoint, media and embeddings."
    ),
    output_dir: Path = BUNDLES_DIR,
    as_json: bool = JSON,
) -> None:
    """Run the workflow on a tiny checkpoint, offline.

    Writes a checkpoint with random weights, builds and checks a bundle, encodes an image and a video
    and answers a question.
    """
    from vlexport.demo import default_recipe, run_demo

    with phases("demo") as progress:
        made = run_demo(recipe or default_recipe(), folder, output_dir, backend, progress)
    if as_json:
        show_json("demo", made)
        return
    for line in made.lines():
        show(line)
