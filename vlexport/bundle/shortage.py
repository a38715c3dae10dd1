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

from vlexport.bundle.os_errors import is_full
from vlexport.errors import ResourceError, VlexportError

# Allocators of torch, ONNX Runtime and the C++ library, threads that found no memory for their stack, and the
# loader of libraries, whose words become an `ImportError` without a number.
_MEMORY = re.compile(
    r"can(?:'|no)t allocate|not enough memory|out of memory|bad.?alloc|failed to allocate|start new thread"
    r"|failed to map segment from shared object(?!: operation not permitted)",
    re.IGNORECASE,
)
# Rust's and C's words for ENOSPC, EFBIG and EDQUOT.
_DISK = re.compile(r"os error (?:28|27|122)\)|no space left|file too large|quota exceeded", re.IGNORECASE)
# A library that hides why a write failed leaves less than this much room behind.
_ROOM = 16 << 20


def shortage(
    error: BaseException, place: Path | None = None, scratch: Path | None = None
) -> ResourceError | None:
    """What ran out, if that is what the error means; `place` is how messages call the disk.

    Where the error hides its reason, it is tried whether `scratch` still has room.
    """
    link: BaseException | None = error
    while link is not None:
        out_of_memory = isinstance(link, OSError) and link.errno == errno.ENOMEM
        if out_of_memory or isinstance(link, MemoryError) or _MEMORY.search(str(link)):
            return ResourceError(
                f"out of memory ({_words(link)}). Give fewer or smaller media at once, build for a smaller "
                "profile, or free memory."
            )
        if (isinstance(link, OSError) and is_full(link)) or _DISK.search(str(link)):
            return _full(place, link)
        link = link.__cause__ or link.__context__
    if scratch is not None and isinstance(error, RuntimeError) and not _has_room(scratch):
        return _full(place, error)
    return None


@contextmanager
def shortages_told(place: Path, scratch: Path) -> Iterator[None]:
    """Raise a `ResourceError` in place of what a library says when memory or the disk of `place` ran out."""
    try:
        yield
    except VlexportError:
        raise
    except (RuntimeError, OSError, MemoryError, ImportError) as error:
        short = shortage(error, place, scratch)
        if short is not None:
            raise short from error
        raise


def _full(place: Path | None, error: BaseException) -> ResourceError:
    where = f"{place}: " if place is not None else ""
    return ResourceError(
        f"{where}the disk is full, or a quota or size limit is reached ({_words(error)}). Nothing "
        "half-written is kept. Free some space or give another folder."
    )


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _has_room(scratch: Path) -> bool:
    """Whether another file could be written, and one larger than every one there."""
    largest = max((path.stat().st_size for path in scratch.rglob("*") if path.is_file()), default=0)
    if not hasattr(os, "posix_fallocate"):
        return shutil.disk_usage(scratch).free > _ROOM
    try:
        with tempfile.TemporaryFile(dir=scratch) as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM)
            # A hole costs nothing, but a limit on the size of files counts it.
            os.ftruncate(file.fileno(), largest + _ROOM)
    except OSError as error:
        return not is_full(error)
    return True
