"""`demo`: the whole line, offline, on a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli.output import phases, show, show_json


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    recipe: str = typer.Option(None, help="A shipped recipe; without one, the windowed tower."),
    backend: str = typer.Option("onnxruntime", help="See `vlexport list`."),
    folder: Path = typer.Option(Path("demo-output"), help="Where checkpoint, media and tokens go."),
    into: Path = typer.Option(Path("engines"), help="Folder for bundles."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Make a tiny checkpoint, build and check a bundle, encode an image and a video, answer a question."""
    from vlexport.demo import default_recipe, run_demo

    with phases("demo") as progress:
        made = run_demo(recipe or default_recipe(), folder, into, backend, progress)
    if as_json:
        show_json("demo", made.to_json())
        return
    for line in made.lines():
        show(line)
