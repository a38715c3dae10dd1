"""`cache`: what bundles and cached results take on the disk, whether they are intact, and removing them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlexport.cli.options import BUNDLES_DIR, JSON, flag, option
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

    listed = entries(bundles)
    if as_json:
        show_json("cache ls", {"entries": list(map(_json, listed)), "bytes": _total(listed)})
        return
    show_table(("kind", "name", "size", "age", "what", "state"), list(map(_row, listed)))
    print_line(f"{len(listed)} entries, {size_text(_total(listed))}")


@app.command("verify")
def verify_entries(bundles: Path = BUNDLES_DIR, as_json: bool = JSON) -> None:
    """Hash every file of every bundle; a damaged one is exit code 5."""
    from vlexport.bundle.inventory import damages, entries

    stored = [entry for entry in entries(bundles) if entry.kind == "bundle"]
    faults = []
    with phases("cache verify") as progress:
        for index, entry in enumerate(stored):
            progress(f"bundle {index + 1} of {len(stored)}", index / len(stored))
            faults.append(damages(entry))
    checked = list(zip(stored, faults, strict=True))
    damaged = [entry.path.name for entry, wrong in checked if wrong]
    if as_json:
        documents = [{**_json(entry), "damages": wrong} for entry, wrong in checked]
        show_json("cache verify", {"entries": documents, "damaged": len(damaged)})
    else:
        rows = [
            (entry.path.name, size_text(entry.num_bytes), "; ".join(wrong) or "intact")
            for entry, wrong in checked
        ]
        show_table(("bundle", "size", "state"), rows)
    with data_is_out():
        if damaged:
            raise BundleError(
                f"{len(damaged)} of {len(checked)} bundles are damaged: {', '.join(damaged)}. "
                "Build them again; a build replaces a damaged bundle."
            )


@app.command("prune")
def prune_entries(
    bundles: Path = BUNDLES_DIR,
    older_than: str | None = option("AGE", "Remove what is older, e.g. 30d, 12h, 2w."),
    max_size: str | None = option("SIZE", "Remove the oldest beyond this total, e.g. 20GB."),
    dry_run: bool = flag("--dry-run", "List what would be removed; remove nothing."),
    as_json: bool = JSON,
) -> None:
    """Remove unfinished builds and, by age or total size, bundles and cached results.

    Without --older-than and --max-size only what interrupted builds left is removed. Running builds are kept.
    """
    from vlexport.bundle.inventory import entries, parse_age, parse_size, remove, superfluous

    age = parse_age(older_than) if older_than is not None else None
    size = parse_size(max_size) if max_size is not None else None
    going = superfluous(entries(bundles), older_than=age, most_bytes=size)
    gone = going if dry_run else [entry for entry in going if remove(entry)]
    kept = [entry for entry in going if entry not in gone]
    if as_json:
        removed = {"dry_run": dry_run, "removed": list(map(_json, gone)), "bytes": _total(gone)}
        show_json("cache prune", {**removed, "in_use": list(map(_json, kept))})
        return
    for entry in kept:
        print_line(f"kept, as it is being built: {entry.path}")
    for entry in gone:
        show(str(entry.path))
    print_line(f"{'would free' if dry_run else 'freed'} {size_text(_total(gone))}: {len(gone)} entries")


def _total(listed: list[Entry]) -> int:
    return sum(entry.num_bytes for entry in listed)


def _described(entry: Entry) -> dict[str, str]:
    if entry.inspection is None or entry.inspection.manifest is None:
        return {}
    manifest = entry.inspection.manifest
    return {
        "recipe": manifest.recipe.name,
        "backend": manifest.target.backend,
        "precision": manifest.precision.name,
        "parity": (entry.inspection.checked or manifest.parity).status,
    }


def _json(entry: Entry) -> dict[str, object]:
    named = {"kind": entry.kind, "path": str(entry.path), "bytes": entry.num_bytes}
    trusted = {"trusted": entry.inspection.trusted} if entry.inspection else {}
    age = {"age_seconds": round(entry.age_seconds)}
    return {**named, **age, **_described(entry), **trusted, "problem": entry.problem or None}


def _row(entry: Entry) -> tuple[str, ...]:
    what = _described(entry)
    state = entry.problem or ("running" if entry.is_running else what.pop("parity", ""))
    path, size, age = entry.path, size_text(entry.num_bytes), age_text(entry.age_seconds)
    name = f"{path.parent.name}/{path.name[:12]}" if entry.kind == "cache" else path.name
    return (entry.kind, name, size, age, " ".join(what.values()), state)


def size_text(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def age_text(seconds: float) -> str:
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.0f} s"
