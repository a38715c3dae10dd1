"""`repro` and `export-inputs`: files for tools of the inference libraries."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli.options import BUNDLE, JSON, RECIPE_FILE, TRUST
from vlexport.cli.output import say, show, show_json


def register(app: typer.Typer) -> None:
    app.command()(repro)
    app.command("export-inputs")(export_inputs)


def repro(
    bundle: Path = BUNDLE,
    output: Path = typer.Option(..., "--output", "-o", metavar="FILE", help="Archive to write, *.zip."),
    block: int = typer.Option(0, metavar="N", help="Index of the block to keep."),
    own_weights: bool = typer.Option(
        False, "--own-weights", help="Include the checkpoint's weights (default: random weights)."
    ),
    trust: str = TRUST,
    recipe: str = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Write a minimal archive for a TensorRT bug report.

    It holds one block of the graph, valid inputs, their expected outputs and the library versions.
    """
    from vlexport.bundle import Bundle
    from vlexport.repro import ReproOptions, write_repro

    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    names = write_repro(opened, output, ReproOptions(block=block, own_weights=own_weights), recipe)
    if as_json:
        show_json("repro", {"out": str(output), "bytes": output.stat().st_size, "files": names})
        return
    say(f"{len(names)} files, {output.stat().st_size:,} bytes")
    show(str(output))


def export_inputs(
    bundle: Path = BUNDLE,
    output_dir: Path = typer.Option(..., "--output-dir", "-o", metavar="DIR", help="Directory to create."),
    trust: str = TRUST,
    recipe: str = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Write valid inputs as raw files for trtexec and Polygraphy.

    The trtexec flags and a data loader script for Polygraphy are written to the same folder.
    """
    from vlexport import inputs
    from vlexport.bundle import Bundle

    found = inputs.export_inputs(Bundle.open(bundle, trust=trust, verify="lazy"), output_dir, recipe)
    if as_json:
        shapes = {case.name: {name: list(each.shape) for name, each in case.inputs.items()} for case in found}
        show_json("export-inputs", {"out": str(output_dir), "cases": shapes})
        return
    for case in found:
        say(f"{case.name}: profile {case.profile}")
    show(str(output_dir))
