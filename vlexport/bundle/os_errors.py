"""What the operating system refused while writing, in words that say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlexport.errors import RequestError, ResourceError

_FULL = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# A library that wraps a failed write into its own error leaves at most this much room behind.
_NEARLY_FULL = 4 << 20


def is_full(error: OSError) -> bool:
    """Whether the disk, the quota or a file's size limit ended a write."""
    return error.errno in _FULL


def check_folder(into: Path) -> None:
    """Refuse a path for bundles that is no folder and that none can be made at; nothing is made."""
    try:
        place = next(place for place in (into, *into.absolute().parents) if place.exists())
    except OSError as error:
        raise RequestError(_no_folder(into, error)) from error
    if not place.is_dir():
        raise RequestError(f"--output-dir {into}: {place} is a file; a folder is expected. Name another one.")


def make_folder(into: Path) -> None:
    """Make the folder for bundles; where the system has none, the path is a wrong request."""
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full(error) or error.errno in _FORBIDDEN:
            raise
        raise RequestError(_no_folder(into, error)) from error


def _no_folder(into: Path, error: OSError) -> str:
    return (
        f"--output-dir {into}: no folder can be made there ({error.strerror}); expected one that you may "
        "write to. Name another one, or change its permissions."
    )


def check_room(path: Path, need: int) -> None:
    """Refuse before starting when the disk of `path` has less than `need` bytes free."""
    if free_bytes(path) < need:
        raise ResourceError(_no_room(path, need, "not enough room"))


def free_bytes(path: Path) -> int:
    """Room on the disk of `path`, or of the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def explained(path: Path, need: int = 0) -> Iterator[None]:
    """Turn a full disk into a `ResourceError` and a forbidden write below `path` into a `RequestError`.

    Other failures pass unchanged; `need` is how many bytes the whole work takes, 0 where nobody knows.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise ResourceError(_no_room(path, need, os.strerror(error.errno or 0))) from error
        if error.errno in _FORBIDDEN and _concerns(path, error):
            raise RequestError(
                f"{error.filename or path}: cannot be written ({error.strerror}); expected a folder that you "
                "may write to. Give another with --output-dir, or change its permissions."
            ) from error
        raise
    except RuntimeError as error:
        if free_bytes(path) < _NEARLY_FULL:
            raise ResourceError(_no_room(path, need, str(error)[:200])) from error
        raise


def _concerns(path: Path, error: OSError) -> bool:
    names = [name for name in (error.filename, error.filename2) if isinstance(name, (str, os.PathLike))]
    return not names or any(Path(name).absolute().is_relative_to(path.absolute()) for name in names)


def _no_room(path: Path, need: int, why: str) -> str:
    wanted = f"{need / 1e6:.1f} MB" if need else "an unknown number of bytes"
    return (
        f"{path}: the disk is full or over its quota ({why}): {wanted} needed, {free_bytes(path) / 1e6:.1f} "
        "MB free. Nothing was kept. Free some space or give another folder with --output-dir."
    )
