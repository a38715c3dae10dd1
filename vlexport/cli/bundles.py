"""`verify`, `parity`, `inspect`: what a bundle is, and whether it can be relied on."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli.details import rows_of
from vlexport.cli.output import data_is_out, phases, say, show, show_json, show_table
from vlexport.errors import ParityError

BUNDLE = typer.Argument(help="A bundle's folder.", exists=True, file_okay=False)
JSON = typer.Option(False, "--json", help="Print JSON.")
TRUST = typer.Option(None, help="Approve a bundle from elsewhere by its digest.")


def register(app: typer.Typer) -> None:
    for command in (verify, parity, inspect):
        app.command()(command)


def verify(
    bundle: Path = BUNDLE,
    trust: str = TRUST,
    recipe: str = typer.Option(None, help="The file of a private recipe."),
    as_json: bool = JSON,
) -> None:
    """Check manifest, hashes, trust and the fit of this machine; nothing is loaded."""
    from vlexport.bundle import Bundle
    from vlexport.runtime.opening import require_fit

    opened = Bundle.open(bundle, trust=trust)
    require_fit(opened, recipe)
    manifest = opened.manifest
    if as_json:
        files = {name: record.sha256 for name, record in manifest.files.items()}
        found = {"bundle": str(bundle), "digest": opened.digest, "target": manifest.target.tag}
        show_json("verify", {**found, "parity": manifest.parity.status, "files": files})
    else:
        show(f"{bundle}: {len(manifest.files)} files intact, trusted, fits {manifest.target}")
        say(f"accuracy check: {manifest.parity.status}")


def parity(
    bundle: Path = BUNDLE,
    against: str = typer.Option(
        None, help="A checkpoint; without it the one that the bundle was built from."
    ),
    layers: bool = typer.Option(False, "--layers", help="Compare block by block and name the first bad one."),
    trust: str = TRUST,
    as_json: bool = JSON,
) -> None:
    """Run the accuracy check again; the verdict is stored when the weights are the bundle's own."""
    from vlexport.build import store_verdict
    from vlexport.bundle import Bundle
    from vlexport.checkpoint import Checkpoint
    from vlexport.parity import check

    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    origin = opened.manifest.checkpoint
    source = Checkpoint.open(against) if against else Checkpoint.open(origin.source, revision=origin.revision)
    with phases("parity") as progress:
        progress("check", 0.0)
        report = check(opened, source if against else None, layers=layers, progress=progress)
        progress("store", 0.0)
        stored = store_verdict(opened, report, source) is not None
    if as_json:
        found = {"bundle": str(bundle), "status": report.status, "stored": stored}
        show_json("parity", {**found, "table": report.to_json()})
    else:
        show(report.table())
        if report.layers is not None:
            show(report.layers.table())
        say("stored as the bundle's verdict" if stored else "other weights: the bundle keeps its verdict")
    with data_is_out():
        if not report.passed:
            raise ParityError(
                f"{bundle}: the accuracy check says '{report.status}', 'passed' expected. "
                "The table says where."
            )


def inspect(
    source: str = typer.Argument(help="A bundle's folder, or a checkpoint: a folder or org/name@revision."),
    as_json: bool = JSON,
) -> None:
    """What is inside a bundle or a checkpoint, without loading it."""
    from vlexport.inspect import describe

    found = describe(source)
    if as_json:
        show_json("inspect", found)
        return
    show_table(("field", "value"), [row for name, value in found.items() for row in rows_of(name, value)])
    if found.get("problem"):
        say(f"problem: {found['problem']}")
