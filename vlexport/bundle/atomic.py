"""Steps on disk that happen whole or not at all, and that outlive a power cut."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from vlexport.errors import BundleError

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
_CANNOT_SWAP = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_MAX_ATTEMPTS = 100


def write_durably(path: Path, raw: bytes) -> None:
    """A new file with these bytes, on the disk when this returns."""
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def sync_tree(folder: Path) -> None:
    """Every file and folder below, and the folder itself, onto the disk."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                sync_tree(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                _sync(Path(entry.path))
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """The names in a folder onto the disk; Windows keeps them by itself."""
    if os.name == "posix":
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(folder: Path, final: Path, aside: Path) -> None:
    """Move `folder` to `final`; what lay there ends up at `folder` or `aside`, for the caller to remove.

    A reader finds the old entry or the new one. Where the system cannot exchange two names (other than Linux,
    some network file systems) there is a moment between two renames in which it finds none.
    """
    for _ in range(_MAX_ATTEMPTS):
        try:
            folder.rename(final)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
        else:
            break
        if _swap(folder, final):
            break
        _move_away(final, aside)
    else:
        raise BundleError(f"{final}: other builders kept replacing it. Wait for them, then build again.")
    sync_folder(final.parent)


def _move_away(final: Path, aside: Path) -> None:
    target = aside / str(sum(1 for _ in aside.iterdir()))
    try:
        final.rename(target)
    except FileNotFoundError:
        return  # Another builder was faster.


def _swap(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system cannot, or `second` is gone."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if exchange is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_SWAP or code == errno.ENOENT:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
