"""Hidden working folders beside the entries, and which of them nobody works in any more.

A folder is named `.staging-<entry>-<machine>-<pid>-<start>-<random>`, so its owner is known as soon as it
exists, without a lock: it is alive when its id is in use by a process that started at that very time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = ".staging-"
_UNKNOWN = "0"
# Processes of other machines cannot be seen; no build takes this long.
_FOREIGN_AGE_SECONDS = 24 * 3600.0
_MAX_ATTEMPTS = 20
_OWN: set[Path] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The process that works in a folder; `started` is a clock tick, `0` where it cannot be read."""

    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid}" + (
            "" if self.machine == _machine() else " of another machine or container"
        )


@contextmanager
def working_folder(into: Path, entry: str) -> Iterator[Path]:
    """A new private folder in `into` that is gone afterwards, whatever happened."""
    pid = os.getpid()
    owner = f"{_machine()}-{pid}-{_start_of(pid) or _UNKNOWN}"
    folder = into / f"{_PREFIX}{entry}-{owner}-{secrets.token_hex(8)}"
    _OWN.add(folder)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        _remove(folder)
        _OWN.discard(folder)


def remove_own() -> None:
    """Remove the folders that this process works in, before it ends without unwinding.

    Other threads may still write there, hence the attempts.
    """
    for folder in tuple(_OWN):
        for _ in range(_MAX_ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break


def owners(into: Path, entry: str) -> list[Owner]:
    """Who works on an entry right now."""
    return [owner for folder, owner in _folders(into, entry) if _is_alive(folder, owner)]


def remove_leftovers(into: Path, entry: str | None = None) -> list[Path]:
    """Remove what dead processes left of one entry, or of all; returns the folders removed."""
    dead = [folder for folder, owner in _folders(into, entry) if not _is_alive(folder, owner)]
    for folder in dead:
        _remove(folder)
    return [folder for folder in dead if not folder.exists()]


def _folders(into: Path, entry: str | None) -> list[tuple[Path, Owner]]:
    found = []
    for folder in sorted(into.glob(f"{_PREFIX}*")):
        words = folder.name.removeprefix(_PREFIX).rsplit("-", 4)
        if len(words) != 5 or not words[2].isdecimal() or folder.is_symlink():
            continue
        if entry is None or words[0] == entry:
            found.append((folder, Owner(machine=words[1], pid=int(words[2]), started=words[3])))
    return found


def _is_alive(folder: Path, owner: Owner) -> bool:
    if owner.machine != _machine() or os.name != "posix":
        try:
            return time.time() - folder.stat().st_mtime < _FOREIGN_AGE_SECONDS
        except FileNotFoundError:
            return False
    try:
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        logger.debug("process %d belongs to another user", owner.pid)
    started = _start_of(owner.pid)
    return started is None or owner.started in (_UNKNOWN, started)


def _start_of(pid: int) -> str | None:
    """When a process started; "dead" for one that waits to be collected, None where nobody says."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may hold anything.
    words = status.rpartition(")")[2].split()
    return "dead" if words[0] in "ZX" else words[19]


def _machine() -> str:
    """Eight digits for this boot of this machine and its process namespace: where ids mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        names = f"{boot}{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        names = platform.node()
    return hashlib.sha256(names.encode()).hexdigest()[:8]


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        logger.debug("%s was removed by somebody else", folder)
    except OSError as error:
        logger.warning(
            "%s: the working folder could not be removed (%s); remove it by hand", folder, error.strerror
        )
