"""Files of a checkpoint's folder: names that stay inside it, links that do not leave it, JSON with limits."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from vlexport.errors import CheckpointError

# The largest config.json in use is below 100 KiB, the largest index below 10 MiB.
MAX_JSON_BYTES = 32 * 2**20
COMMIT = re.compile(r"[0-9a-f]{40}")


def open_inside(folder: Path, name: str) -> BufferedReader:
    """Open a regular file of the folder for reading; links may not leave the folder."""
    path = folder / name
    if not name or name in (".", "..") or "\0" in name or "\\" in name or Path(name).name != name:
        raise CheckpointError(
            f"{folder}: file name {name!r} given; expected a plain name inside the checkpoint's folder. "
            f"Put all files of a checkpoint side by side."
        )
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(link_root(folder)):
            raise CheckpointError(
                f"{path} is a link to {real}, outside the checkpoint; expected files inside it. Copy the "
                f"file there."
            )
        if not stat.S_ISREG(real.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file; expected one. Put the file itself there.")
        return real.open("rb")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise CheckpointError(
            f"{path} cannot be read ({reason(error)}); expected a readable file. Check the file and its "
            f"rights."
        ) from error


def link_root(folder: Path) -> Path:
    """Where links may lead: the folder itself, or the hub cache entry that the folder is a snapshot of.

    The hub cache keeps `snapshots/COMMIT/NAME` as links into `blobs/` of the same entry.
    """
    real = folder.resolve()
    entry = real.parent.parent
    if COMMIT.fullmatch(real.name) and real.parent.name == "snapshots" and (entry / "blobs").is_dir():
        return entry
    return real


def read_json(folder: Path, name: str) -> dict[str, object]:
    """The JSON object in a file of the folder; duplicate keys, NaN and oversized files are refused."""
    with open_inside(folder, name) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{folder / name} is larger than {MAX_JSON_BYTES} bytes; expected a configuration file below "
            f"that. Check that the right file lies there."
        )
    return parse_object(raw, str(folder / name))


def parse_object(raw: bytes, where: str) -> dict[str, object]:
    """Strict JSON with an object at the top."""
    try:
        value: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not valid JSON ({reason(error)}). Download or save the checkpoint again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} holds a JSON {type(value).__name__}; expected an object. Save the checkpoint again."
        )
    return value


def reason(error: BaseException) -> str:
    """The library's words, without its path."""
    words = error.strerror if isinstance(error, OSError) else str(error)
    return words or type(error).__name__


def listed(names: Sequence[str], most: int = 10) -> str:
    """Sorted names, the first few of them, and how many more there are."""
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return entries


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
