"""Memory or disk that ran out, told from whatever a library made of it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlexport.bundle.faults import is_full
from vlexport.errors import ResourceError, VlexportError

# Allocators of torch, ONNX Runtime and the C++ library, and threads that found no memory for their stack.
_MEMORY = re.compile(
    r"can(?:'|no)t allocate|not enough memory|out of memory|bad.?alloc|failed to allocate|start new thread",
    re.IGNORECASE,
)
# Rust's and C's words for ENOSPC, EFBIG and EDQUOT.
_DISK = re.compile(r"os error (?:28|27|122)\)|no space left|file too large|quota exceeded", re.IGNORECASE)
# A library that hides why a write failed leaves less than this much room behind.
_ROOM = 16 << 20


def shortage(error: BaseException, folder: Path | None = None) -> ResourceError | None:
    """What ran out, if that is what the error means; room in `folder` is tried where the error hides it."""
    link: BaseException | None = error
    while link is not None:
        out_of_memory = isinstance(link, OSError) and link.errno == errno.ENOMEM
        if out_of_memory or isinstance(link, MemoryError) or _MEMORY.search(str(link)):
            return ResourceError(
                f"out of memory ({_words(link)}). Give fewer or smaller media at once, build for a smaller "
                "profile, or free memory."
            )
        if (isinstance(link, OSError) and is_full(link)) or _DISK.search(str(link)):
            return _full(folder, link)
        link = link.__cause__ or link.__context__
    if folder is not None and isinstance(error, RuntimeError) and not _has_room(folder):
        return _full(folder, error)
    return None


@contextmanager
def shortages_told(folder: Path) -> Iterator[None]:
    """Raise a `ResourceError` in place of what a library says when memory or the disk of `folder` ran out."""
    try:
        yield
    except VlexportError:
        raise
    except (RuntimeError, OSError, MemoryError) as error:
        short = shortage(error, folder)
        if short is not None:
            raise short from error
        raise


def _full(folder: Path | None, error: BaseException) -> ResourceError:
    where = f"{folder}: " if folder is not None else ""
    return ResourceError(
        f"{where}the disk is full, or a quota or size limit is reached ({_words(error)}). Nothing "
        "half-written is kept. Free some space or give another folder."
    )


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _has_room(folder: Path) -> bool:
    """Whether a file could still be written that is larger than every one there."""
    largest = max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)
    if not hasattr(os, "posix_fallocate"):
        return shutil.disk_usage(folder).free > _ROOM
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, largest + _ROOM)
    except OSError as error:
        return not is_full(error)
    return True
