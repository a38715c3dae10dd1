"""`verify`, `parity`, `inspect`: what a bundle is, and whether it can be relied on."""

from __future__ import annotations

from pathlib import Path

import typer

from vlexport.cli.output import phases, say, show, show_json, show_table
from vlexport.errors import ParityError

JSON = typer.Option(False, "--json", help="Print JSON.")
TRUST = typer.Option(None, help="Approve a bundle from elsewhere by its digest.")


def register(app: typer.Typer) -> None:
    for command in (verify, parity, inspect):
        app.command()(command)


def verify(bundle: Path, trust: str = TRUST, as_json: bool = JSON) -> None:
    """Check manifest, hashes, trust and the fit of this machine; nothing is loaded."""
    from vlexport.backends import find_backend
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle, trust=trust)
    target = opened.manifest.target
    opened.require_fit(find_backend(target.backend).target())
    if as_json:
        files = {name: record.sha256 for name, record in opened.manifest.files.items()}
        show_json("verify", {"bundle": str(bundle), "digest": opened.digest, "files": files})
    else:
        show(f"{bundle}: {len(opened.manifest.files)} files intact, trusted, fits {target}")


def parity(
    bundle: Path,
    against: str = typer.Option(
        None, help="A checkpoint; without it the one that the bundle was built from."
    ),
    layers: bool = typer.Option(False, "--layers", help="Compare block by block and name the first bad one."),
    trust: str = TRUST,
    as_json: bool = JSON,
) -> None:
    """Run the accuracy check again; the verdict is stored when the weights are the bundle's own."""
    from vlexport.bundle import Bundle
    from vlexport.checkpoint import Checkpoint
    from vlexport.parity import check

    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    source = Checkpoint.open(against) if against else None
    with phases("parity") as progress:
        report = check(opened, against=source, layers=layers, progress=progress)
    if as_json:
        show_json("parity", {"bundle": str(bundle), "status": report.status, "table": report.to_json()})
    else:
        show(report.table())
    if report.status == "failed":
        raise ParityError(f"{bundle}: the engine does not agree with the reference; the table says where.")


def inspect(source: str, as_json: bool = JSON) -> None:
    """What is inside a bundle or a checkpoint, without loading it."""
    from vlexport.inspect import describe

    found = describe(source)
    if as_json:
        show_json("inspect", found)
        return
    show_table(("field", "value"), [(name, _one_line(value)) for name, value in found.items()])
    if found.get("problem"):
        say(f"problem: {found['problem']}")


def _one_line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_one_line(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_one_line, value))
    return str(value)
