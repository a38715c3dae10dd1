"""Which file names a bundle may hold: plain ones that mean the same everywhere and stay inside the folder."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vlexport.errors import InputError

MANIFEST_NAME = "manifest.json"
# Where a build keeps what it read back from the network that its library made; few backends have one.
NETWORK_NAME = "network.json"
MAX_FILES = 10_000

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
_MAX_LENGTH, _MAX_PARTS = 240, 8
# Device names on Windows, with any extension.
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


def check_part(part: str, what: str) -> str:
    """One path component; returned unchanged, else an `InputError`."""
    if not _PART.fullmatch(part) or part.endswith(".") or _DEVICES.fullmatch(part):
        raise InputError(
            f"{what} {part[:120]!r} given; expected up to 100 letters, digits and . _ + - that do not begin "
            f"or end with a dot and are no device name. Rename it."
        )
    return part


def check_name(name: str) -> str:
    """A relative name with forward slashes; returned unchanged, else an `InputError`."""
    parts = name.split("/")
    if len(name) > _MAX_LENGTH or len(parts) > _MAX_PARTS:
        raise InputError(
            f"file name {name[:120]!r} given; expected at most {_MAX_LENGTH} characters in {_MAX_PARTS} "
            "folders. Shorten it."
        )
    for part in parts:
        check_part(part, f"file name {name[:120]!r} with part")
    return name


def check_names(names: Iterable[str]) -> None:
    """A whole table of payload names: each legal, none the manifest, none equal but for case."""
    seen: dict[str, str] = {MANIFEST_NAME: MANIFEST_NAME}
    for name in names:
        other = seen.setdefault(check_name(name).lower(), name)
        if other != name or name == MANIFEST_NAME:
            raise InputError(
                f"file name {name!r} given beside {other!r}; expected names that differ without case."
            )
    if len(seen) > MAX_FILES:
        raise InputError(f"{len(seen)} files given; expected at most {MAX_FILES}.")
