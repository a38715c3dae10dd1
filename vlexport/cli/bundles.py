"""`bundles` and `cache`: what both take on the disk, whether bundles are intact, and removing them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlexport.cli.options import BUNDLE, BUNDLES_DIR, JSON, argument, flag, option
from vlexport.cli.output import data_is_out, print_line, show, show_json, show_table
from vlexport.cli.progress import phases
from vlexport.errors import BundleError, RequestError, VlexportError

if TYPE_CHECKING:
    from vlexport.bundle.inventory import Entry

bundles = typer.Typer(name="bundles", help="List, name and remove bundles.", rich_markup_mode=None)
cache = typer.Typer(
    name="cache", help="List and remove cached results, which are made again.", rich_markup_mode=None
)
OLDER = option("AGE", "Remove what was built or pulled so long ago, e.g. 30d, 12h, 2w.")
UNUSED = option("AGE", "Remove what was not used for so long, e.g. 30d, 12h, 2w.")
LARGER = option("SIZE", "Remove the oldest beyond this total, e.g. 20GB.")
DRY = flag("--dry-run", "List what would be removed; remove nothing.")


@bundles.command("ls")
def list_bundles(
    folder: Path = BUNDLES_DIR,
    check: bool = flag("--check", "Hash every file of every bundle; a damaged one is exit code 5."),
    as_json: bool = JSON,
) -> None:
    """List bundles and unfinished builds, oldest first."""
    from vlexport.bundle import inventory

    listed, faults = inventory.bundles(folder), {}
    stored = [entry for entry in listed if entry.kind == "bundle"]
    if check:
        with phases("bundles ls") as progress:
            for index, entry in enumerate(stored):
                progress(f"bundle {index + 1} of {len(stored)}", index / len(stored))
                faults[entry.path] = inventory.damages(entry)
    damaged = [path.name for path, wrong in faults.items() if wrong]
    if as_json:
        documents = [
            {**_json(entry), **({"damages": faults[entry.path]} if entry.path in faults else {})}
            for entry in listed
        ]
        show_json("bundles ls", {"entries": documents, "bytes": _total(listed), "damaged": len(damaged)})
    else:
        rows = [_row(entry, "; ".join(faults.get(entry.path, []))) for entry in listed]
        show_table(("kind", "name", "tags", "size", "age", "what", "state"), rows)
        print_line(f"{len(listed)} entries, {size_text(_total(listed))}")
    with data_is_out():
        if damaged:
            raise BundleError(
                f"{len(damaged)} of {len(stored)} bundles are damaged: {', '.join(damaged)}. "
                "Build them again; a build replaces a damaged bundle."
            )


@bundles.command("rm")
def remove_bundles(
    names: list[str] = argument("NAME", "Folders or tags of bundles.", default=None),
    folder: Path = BUNDLES_DIR,
    unfinished: bool = flag("--unfinished", "Remove what interrupted builds left; running builds are kept."),
    older_than: str | None = OLDER,
    max_size: str | None = LARGER,
    dry_run: bool = DRY,
    as_json: bool = JSON,
) -> None:
    """Remove bundles: by name, by age or by total size.

    The tags of a bundle go with it; of a tag that is named, the tag alone.
    """
    from vlexport.bundle import inventory

    if not (names or unfinished or older_than or max_size):
        raise RequestError(
            "nothing named; names of bundles, --unfinished, --older-than AGE or --max-size SIZE expected. "
            "`vlexport bundles ls` lists them."
        )
    limits = _limits(older_than, max_size)
    listed = inventory.bundles(folder)
    going = [entry for entry in listed if unfinished and entry.kind == "unfinished" and entry.problem]
    going += inventory.superfluous((entry for entry in listed if entry.kind == "bundle"), **limits)
    going += inventory.named(folder, names or [], listed)
    _remove("bundles rm", inventory.distinct(going), dry_run=dry_run, as_json=as_json)


@bundles.command("tag")
def tag_bundle(
    bundle: Path = BUNDLE,
    name: str = argument("NAME", "Name beside the bundle's own; one that another bundle has is moved."),
    as_json: bool = JSON,
) -> None:
    """Give a bundle a name: a link beside it."""
    from vlexport.bundle import Bundle
    from vlexport.bundle.store import tag

    link = tag(Bundle.open(bundle, verify="lazy").path, name)
    if as_json:
        show_json("bundles tag", {"bundle": str(bundle), "tag": str(link)})
        return
    show(str(link))


@cache.command("ls")
def list_cached(as_json: bool = JSON) -> None:
    """List cached results, least recently used first."""
    from vlexport.bundle import inventory

    listed = inventory.cached()
    if as_json:
        show_json("cache ls", {"entries": list(map(_json, listed)), "bytes": _total(listed)})
        return
    rows = [(_name(entry), size_text(entry.num_bytes), age_text(entry.age_seconds)) for entry in listed]
    show_table(("name", "size", "last used"), rows)
    print_line(f"{len(listed)} entries, {size_text(_total(listed))}")


@cache.command("prune")
def prune_cached(
    older_than: str | None = UNUSED,
    max_size: str | None = LARGER,
    dry_run: bool = DRY,
    as_json: bool = JSON,
) -> None:
    """Remove cached results, least recently used first; all of them without options."""
    from vlexport.bundle import inventory

    listed, limits = inventory.cached(), _limits(older_than, max_size)
    going = inventory.superfluous(listed, **limits) if older_than or max_size else listed
    _remove("cache prune", going, dry_run=dry_run, as_json=as_json)


def _limits(older_than: str | None, max_size: str | None) -> dict[str, Any]:
    from vlexport.bundle.inventory import parse_age, parse_size

    age = parse_age(older_than) if older_than is not None else None
    return {"older_than": age, "most_bytes": parse_size(max_size) if max_size is not None else None}


def _remove(verb: str, going: list[Entry], *, dry_run: bool, as_json: bool) -> None:
    from vlexport.bundle.inventory import remove

    gone: list[Entry] = []
    kept: list[Entry] = []
    problem = None
    try:
        for entry in going:
            (gone if dry_run or remove(entry) else kept).append(entry)
    except VlexportError as error:
        if not gone:
            raise
        problem = error
    _show_removed(verb, gone, kept, dry_run=dry_run, as_json=as_json)
    with data_is_out():
        if problem is not None:
            raise problem


def _show_removed(verb: str, gone: list[Entry], kept: list[Entry], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        removed = {"dry_run": dry_run, "removed": list(map(_json, gone)), "bytes": _total(gone)}
        show_json(verb, {**removed, "in_use": list(map(_json, kept))})
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
    tags = {"tags": list(entry.tags)} if entry.kind == "bundle" else {}
    return {**named, **tags, **age, **_described(entry), **trusted, "problem": entry.problem or None}


def _row(entry: Entry, damage: str) -> tuple[str, ...]:
    what = _described(entry)
    state = damage or entry.problem or ("running" if entry.is_running else what.pop("parity", ""))
    size, age = size_text(entry.num_bytes), age_text(entry.age_seconds)
    return (entry.kind, _name(entry), " ".join(entry.tags), size, age, " ".join(what.values()), state)


def _name(entry: Entry) -> str:
    path = entry.path
    return f"{path.parent.name}/{path.name[:12]}" if entry.kind == "cache" else path.name


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
