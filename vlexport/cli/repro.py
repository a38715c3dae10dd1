"""`repro` and `export-inputs`: what other people's tools take."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli.bundles import BUNDLE, JSON, TRUST
from vlexport.cli.output import say, show, show_json

RECIPE = typer.Option(None, help="The file of a private recipe.")


def register(app: typer.Typer) -> None:
    app.command()(repro)
    app.command("export-inputs")(export_inputs)


def repro(
    bundle: Path = BUNDLE,
    out: Path = typer.Option(..., help="Archive to write, *.zip."),
    block: int = typer.Option(0, help="The block that is kept."),
    own_weights: bool = typer.Option(False, "--own-weights", help="Put the checkpoint's weights in."),
    trust: str = TRUST,
    recipe: str = RECIPE,
    as_json: bool = JSON,
) -> None:
    """A small archive for a library's makers: one block of the graph, legal inputs, versions."""
    from vlexport.bundle import Bundle
    from vlexport.repro import ReproOptions, write_repro

    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    names = write_repro(opened, out, ReproOptions(block=block, own_weights=own_weights), recipe)
    if as_json:
        show_json("repro", {"out": str(out), "bytes": out.stat().st_size, "files": names})
        return
    say(f"{len(names)} files, {out.stat().st_size:,} bytes")
    show(str(out))


def export_inputs(
    bundle: Path = BUNDLE,
    out: Path = typer.Option(..., help="Folder to make."),
    trust: str = TRUST,
    recipe: str = RECIPE,
    as_json: bool = JSON,
) -> None:
    """Inputs that respect the grid, as raw files with flags for trtexec and a script for Polygraphy."""
    from vlexport import inputs
    from vlexport.bundle import Bundle

    found = inputs.export_inputs(Bundle.open(bundle, trust=trust, verify="lazy"), out, recipe)
    if as_json:
        shapes = {case.name: {name: list(each.shape) for name, each in case.inputs.items()} for case in found}
        show_json("export-inputs", {"out": str(out), "cases": shapes})
        return
    for case in found:
        say(f"{case.name}: profile {case.profile}")
    show(str(out))
