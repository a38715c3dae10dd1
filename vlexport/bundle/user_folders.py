"""The user's folders: of data, and of the cache, whose files cost time to make and nothing else to lose.

A file of the cache is written whole or not at all. A missing, damaged or too large one is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vlexport.errors import RequestError
from vlexport.system import replacing

logger = logging.getLogger(__name__)

MOST_BYTES = 256 * 2**20
# A build of one checkpoint keeps up to six, most of them a few kilobytes.
MOST_FILES = 128
# Where accounts without a home have theirs: nothing is there, and nobody can write to it.
NO_HOME = Path("/nonexistent")
DIGEST_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFile:
    """One blob, read and written whole."""

    path: Path

    @classmethod
    def of(cls, folder: str, *parts: str) -> CacheFile:
        readable = "-".join(re.sub(r"[^\w.+]", "_", part, flags=re.ASCII) for part in parts)[:120]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return cls(path=user_cache() / folder / f"{readable}-{digest}.cache")

    def read(self) -> bytes:
        try:
            if self.path.stat().st_size > MOST_BYTES:
                return b""
            content = self.path.read_bytes()
            # What is used stays, where the folder may be written to.
            with contextlib.suppress(OSError):
                os.utime(self.path)
            return content
        except FileNotFoundError:
            return b""
        except OSError as error:
            logger.warning("%s cannot be read and is ignored: %s", self.path, error.strerror)
            return b""

    def recall(self) -> bytes | None:
        stored = self.read()
        digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        return content if digest == hashlib.sha256(content).digest() else None

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def keep(self, content: bytes) -> None:
        self.write(hashlib.sha256(content).digest() + content)

    def write(self, content: bytes) -> None:
        """Keep it whole or not at all; of too many files those go that were used least recently."""
        if not content or len(content) > MOST_BYTES:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with replacing(self.path) as temporary, os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(content)
            self._tidy()
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path, error.strerror)

    def _tidy(self) -> None:
        # Another process may be tidying too.
        with contextlib.suppress(FileNotFoundError):
            files = sorted(self.path.parent.glob("*.cache"), key=lambda path: path.stat().st_mtime)
            for old in files[:-MOST_FILES]:
                old.unlink()


def forget(folder: str, contents: Iterable[bytes]) -> list[Path]:
    """Remove the files in which `keep` has written any of these contents, and return their paths."""
    digests, removed = {hashlib.sha256(content).digest() for content in contents}, []
    for path in sorted((user_cache() / folder).glob("*.cache")):
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                digest = file.read(DIGEST_BYTES)
            if digest in digests:
                path.unlink()
                removed.append(path)
    return removed


def user_cache() -> Path:
    """Return the user's cache folder for vlexport: where the platform has it, or `~/.cache`."""
    try:
        import platformdirs
    except ModuleNotFoundError:
        named = os.environ.get("XDG_CACHE_HOME", "")
        home = os.path.expanduser("~/.cache")  # noqa: PTH111  without a home, no error
        return _at_home(lambda: Path(named if Path(named).is_absolute() else home) / "vlexport")
    return _at_home(lambda: platformdirs.user_cache_path("vlexport", appauthor=False))


def user_data_folder() -> Path:
    """Return the user's data folder: in `XDG_DATA_HOME` where that is set, else where the platform has it."""
    named = os.environ.get("XDG_DATA_HOME", "")
    if Path(named).is_absolute():
        return Path(named) / "vlexport"
    try:
        import platformdirs
    except ModuleNotFoundError as error:
        raise RequestError(
            "the folder for approvals of bundles is not known: the package platformdirs is not installed. "
            "Install it, or set XDG_DATA_HOME to a folder of your own."
        ) from error
    return _at_home(lambda: platformdirs.user_data_path("vlexport", appauthor=False))


def _at_home(folder: Callable[[], Path]) -> Path:
    """Return a folder of the user; without a home platformdirs raises, or names a relative one."""
    try:
        place = folder()
    except RuntimeError:
        return NO_HOME
    return place if place.is_absolute() else NO_HOME
