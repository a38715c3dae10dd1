"""`cache`: what bundles and cached results take on the disk, whether they are intact, and removing them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlexport.cli.options import BUNDLES_DIR, JSON
from vlexport.cli.output import data_is_out, print_line, show, show_json, show_table
from vlexport.cli.progress import phases
from vlexport.errors import BundleError

if TYPE_CHECKING:
    from vlexport.bundle.inventory import Entry

app = typer.Typer(
    name="cache", help="List, verify and remove bundles and cached results.", rich_markup_mode=None
)


@app.command("ls")
def list_entries(bundles: Path = BUNDLES_DIR, as_json: bool = JSON) -> None:
    """List bundles, unfinished builds and cached results, oldest first."""
    from vlexport.bundle.inventory import entries

    found = entries(bundles)
    if as_json:
        show_json("cache ls", {"entries": [_json(each) for each in found], "bytes": _total(found)})
        return
    show_table(("kind", "name", "size", "age", "what", "state"), [_row(each) for each in found])
    print_line(f"{len(found)} entries, {size_text(_total(found))}")


@app.command("verify")
def verify_entries(bundles: Path = BUNDLES_DIR, as_json: bool = JSON) -> None:
    """Hash every file of every bundle; a damaged one is exit code 5."""
    from vlexport.bundle.inventory import damages, entries

    checked = []
    found = [each for each in entries(bundles) if each.kind == "bundle"]
    with phases("cache verify") as progress:
        for index, each in enumerate(found):
            progress(f"bundle {index + 1} of {len(found)}", index / len(found))
            checked.append((each, damages(each)))
    damaged = [each.path.name for each, faults in checked if faults]
    if as_json:
        documents = [{**_json(each), "damages": faults} for each, faults in checked]
        show_json("cache verify", {"entries": documents, "damaged": len(damaged)})
    else:
        rows = [
            (each.path.name, size_text(each.num_bytes), "; ".join(faults) or "intact")
            for each, faults in checked
        ]
        show_table(("bundle", "size", "state"), rows)
    if damaged:
        with data_is_out():
            raise BundleError(
                f"{len(damaged)} of {len(checked)} bundles are damaged: {', '.join(damaged)}. "
                "Build them again; a build replaces a damaged bundle."
            )


@app.command("prune")
def prune_entries(
    bundles: Path = BUNDLES_DIR,
    older_than: str | None = typer.Option(
        None, metavar="AGE", help="Remove what is older, e.g. 30d, 12h, 2w."
    ),
    max_size: str | None = typer.Option(
        None, metavar="SIZE", help="Remove the oldest beyond this total, e.g. 20GB."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="List what would be removed; remove nothing."),
    as_json: bool = JSON,
) -> None:
    """Remove unfinished builds and, by age or total size, bundles and cached results.

    Without --older-than and --max-size only what interrupted builds left is removed. Running builds are kept.
    """
    from vlexport.bundle.inventory import entries, parse_age, parse_size, remove, superfluous

    age = parse_age(older_than) if older_than is not None else None
    size = parse_size(max_size) if max_size is not None else None
    going = superfluous(entries(bundles), older_than=age, most_bytes=size)
    gone = going if dry_run else [each for each in going if remove(each)]
    kept = [each for each in going if each not in gone]
    if as_json:
        removed = [_json(each) for each in gone]
        content = {
            "dry_run": dry_run,
            "removed": removed,
            "bytes": _total(gone),
            "in_use": [_json(each) for each in kept],
        }
        show_json("cache prune", content)
        return
    for each in kept:
        print_line(f"kept, as it is being built: {each.path}")
    for each in gone:
        show(str(each.path))
    print_line(f"{'would free' if dry_run else 'freed'} {size_text(_total(gone))}: {len(gone)} entries")


def _total(found: list[Entry]) -> int:
    return sum(each.num_bytes for each in found)


def _described(each: Entry) -> dict[str, str]:
    """Return recipe, backend, precision and verdict of a bundle."""
    if each.found is None or each.found.manifest is None:
        return {}
    manifest = each.found.manifest
    verdict = each.found.checked or manifest.parity
    return {
        "recipe": manifest.recipe.name,
        "backend": manifest.target.backend,
        "precision": manifest.precision.name,
        "parity": verdict.status,
    }


def _json(each: Entry) -> dict[str, object]:
    named = {
        "kind": each.kind,
        "path": str(each.path),
        "bytes": each.num_bytes,
        "age_seconds": round(each.age_seconds),
    }
    trusted = {"trusted": each.found.trusted} if each.found else {}
    return {**named, **_described(each), **trusted, "problem": each.problem or None}


def _row(each: Entry) -> tuple[str, ...]:
    what = _described(each)
    state = each.problem or ("running" if each.is_running else what.pop("parity", ""))
    name = f"{each.path.parent.name}/{each.path.name[:12]}" if each.kind == "cache" else each.path.name
    return (
        each.kind,
        name,
        size_text(each.num_bytes),
        age_text(each.age_seconds),
        " ".join(what.values()),
        state,
    )


def size_text(num_bytes: int) -> str:
    """Return a size in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def age_text(seconds: float) -> str:
    """Return an age in its largest unit."""
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.0f} s"
