"""What a folder of bundles and the user's cache hold: sizes, ages, damages, and which of them may go."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlexport.bundle.bundle import Bundle, Inspection
from vlexport.bundle.files import MANIFEST_NAME, check_part, check_payload
from vlexport.bundle.store import is_tag, remove_entry, remove_leftovers, tags_of, unfinished
from vlexport.bundle.user_folders import user_cache
from vlexport.errors import BundleError, LockedError, RequestError

Kind = Literal["bundle", "unfinished", "cache", "tag"]
SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A bundle with its tags, a build's working folder, or a cache file; `problem`: why it cannot be used."""

    kind: Kind
    path: Path
    num_bytes: int
    age_seconds: float
    inspection: Inspection | None = None
    problem: str = ""
    tags: tuple[str, ...] = ()

    @property
    def is_running(self) -> bool:
        return self.kind == "unfinished" and not self.problem


def bundles(into: Path) -> list[Entry]:
    """Return the bundles and the working folders of a folder, oldest first."""
    listed = [*_bundles(into), *_unfinished(into)]
    return sorted(listed, key=lambda entry: (entry.kind != "bundle", -entry.age_seconds))


def cached() -> list[Entry]:
    """Return the files of the user's cache, least recently used first."""
    files = []
    for path in sorted(user_cache().glob("*/*.cache")):
        size, age = _measured(path)
        files.append(Entry(kind="cache", path=path, num_bytes=size, age_seconds=age))
    return sorted(files, key=lambda entry: -entry.age_seconds)


def _bundles(into: Path) -> Iterator[Entry]:
    for manifest in sorted(into.glob(f"*/{MANIFEST_NAME}")):
        folder = manifest.parent
        if folder.name.startswith(".") or folder.is_symlink():
            continue
        inspected, problem = None, ""
        try:
            inspected = Bundle.inspect(folder)
            problem = inspected.problem or ""
        except BundleError as error:
            problem = str(error)
        size, age = _measured(folder)
        yield Entry(
            kind="bundle",
            path=folder,
            num_bytes=size,
            age_seconds=age,
            inspection=inspected,
            problem=problem,
            tags=tuple(link.name for link in tags_of(folder)),
        )


def _unfinished(into: Path) -> Iterator[Entry]:
    for build in unfinished(into):
        size, age = _measured(build.folder)
        kept = "was interrupted; its engine is kept for the next"
        end = kept if build.has_engine else "has ended without removing it"
        problem = f"its build {end}" if build.is_abandoned() else ""
        yield Entry(kind="unfinished", path=build.folder, num_bytes=size, age_seconds=age, problem=problem)


def _measured(path: Path) -> tuple[int, float]:
    try:
        changed = path.lstat().st_mtime
        sizes = [file.lstat().st_size for file in (path, *path.rglob("*")) if not file.is_dir()]
    except FileNotFoundError:
        return 0, 0.0
    return sum(sizes), max(0.0, time.time() - changed)


def named(into: Path, names: Iterable[str], listed: list[Entry]) -> list[Entry]:
    """Return the entries of these paths, or of names in a folder; a tag is an entry of its own."""
    entries = []
    for name in names:
        # `./name` too, of which `Path` keeps the name alone.
        is_path = any(mark in name for mark in (os.sep, os.altsep) if mark)
        path = Path(name) if is_path else into / name
        here = [entry for entry in listed if entry.kind == "bundle" and entry.path == path]
        if is_tag(path):
            here = [Entry(kind="tag", path=path, num_bytes=0, age_seconds=_measured(path)[1])]
        elif not here:
            here = [entry for entry in _bundles(path.parent) if entry.path == path]
        if not here:
            raise RequestError(f"{path}: no bundle or tag. `vlexport bundles ls` lists them.")
        entries += here
    return entries


def damages(entry: Entry) -> list[str]:
    """Hash every file of a bundle and return what differs from its manifest."""
    if entry.inspection is None or entry.inspection.manifest is None or entry.problem:
        return [entry.problem]
    faults = []
    for name, record in entry.inspection.manifest.files.items():
        try:
            check_payload(entry.path, name, record)
        except BundleError as error:
            faults.append(str(error))
    return faults


def superfluous(
    listed: Iterable[Entry], *, older_than: float | None = None, most_bytes: int | None = None
) -> list[Entry]:
    """Return those that are too old, and the oldest beyond a size."""
    staying = list(listed)
    going = [entry for entry in staying if older_than is not None and entry.age_seconds > older_than]
    staying = [entry for entry in staying if entry not in going]
    rest = sum(entry.num_bytes for entry in staying)
    while most_bytes is not None and staying and rest > most_bytes:
        going.append(staying.pop(0))
        rest -= going[-1].num_bytes
    return going


def distinct(entries: Iterable[Entry]) -> list[Entry]:
    """Return each place once, however it is spelled; refuse names that `remove` refuses."""
    places: dict[Path, Entry] = {}
    for entry in entries:
        if entry.kind == "bundle":
            check_part(entry.path.name, "entry name")
        places.setdefault(Path(os.path.realpath(entry.path.parent), entry.path.name), entry)
    return list(places.values())


def remove(entry: Entry) -> bool:
    """Remove an entry; False for a bundle that somebody builds at this moment."""
    if entry.kind == "bundle":
        try:
            remove_entry(entry.path.parent, entry.path.name)
        except LockedError:
            return False
    elif entry.kind == "unfinished":
        for build in unfinished(entry.path.parent):
            if build.folder == entry.path:
                # By its lock: processes of other containers have numbers of their own.
                remove_leftovers(entry.path.parent, build.entry)
        return not entry.path.exists()
    else:
        entry.path.unlink(missing_ok=True)
    return True


def parse_age(text: str) -> float:
    """Return seconds of an age such as 30d, 12h or 2w."""
    return _scaled(text, SECONDS, "age", "30d, 12h or 2w")


def parse_size(text: str) -> int:
    """Return bytes of a size such as 20GB or 500MB."""
    return int(_scaled(text.upper().removesuffix("B").lower(), BYTES, "size", "20GB or 500MB"))


def _scaled(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]?)", text.strip().lower())
    scaled = float(match[1]) * units[match[2]] if match is not None and match[2] in units else math.inf
    if math.isinf(scaled):
        raise RequestError(f"{what} {text!r} given; a number with a unit expected, such as {example}.")
    return scaled
