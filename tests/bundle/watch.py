"""A canary: a file outside of a bundle that notices when anybody opens it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_ACCESS, _IN_MODIFY, _IN_ATTRIB, _IN_OPEN, _IN_DELETE_SELF, _IN_MOVE_SELF = 1, 2, 4, 0x20, 0x400, 0x800
_EVERYTHING = _IN_ACCESS | _IN_MODIFY | _IN_ATTRIB | _IN_OPEN | _IN_DELETE_SELF | _IN_MOVE_SELF


@contextmanager
def untouched(path: Path) -> Iterator[None]:
    """Fail unless the file is neither opened, read, written, moved nor removed meanwhile (Linux inotify)."""
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert watcher >= 0
    try:
        assert libc.inotify_add_watch(watcher, os.fsencode(path), _EVERYTHING) >= 0
        yield
        assert not _events(watcher), f"{path} was touched"
    finally:
        os.close(watcher)


def _events(watcher: int) -> bytes:
    try:
        return os.read(watcher, 4096)
    except BlockingIOError:
        return b""
