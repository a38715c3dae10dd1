"""`new`: first versions of private recipes and backends, with their first tests."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli.options import JSON, argument, option
from vlexport.cli.output import show, show_json

app = typer.Typer(name="new", help="Write a private recipe or backend to extend.", rich_markup_mode=None)
OUTPUT = option("FILE", "File to write, its test beside it (default: NAME.py).", "--output", "-o")


@app.command("recipe")
def recipe(
    model_dir: str = argument("MODEL_DIR", "Local directory, or org/name[@revision] on the Hub."),
    output: Path | None = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Write a recipe from config.json and the class in transformers, and a test.

    The class is traced whole, as by the generic recipe. No code of the checkpoint is run.
    """
    from vlexport.tools.scaffold import new_recipe

    _show("recipe", new_recipe(model_dir, output), as_json=as_json)


@app.command("backend")
def backend(
    name: str = argument("NAME", "Letters, digits and _."), output: Path | None = OUTPUT, as_json: bool = JSON
) -> None:
    """Write a backend that stores the traced program and runs it in PyTorch, and a test."""
    from vlexport.tools.scaffold import new_backend

    _show("backend", new_backend(name, output), as_json=as_json)


def _show(kind: str, files: list[Path], *, as_json: bool) -> None:
    if as_json:
        show_json(f"new {kind}", {"files": list(map(str, files))})
        return
    for path in files:
        show(str(path))
