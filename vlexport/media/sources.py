"""Opening of media sources: regular local files, bytes and what holds bytes; nothing else."""

from __future__ import annotations

import base64
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vlexport.errors import MediaError, VlexportError
from vlexport.media.limits import MediaLimits
from vlexport.system import shortage

# `Path("https://host")` has one slash left. A drive letter is one letter, a scheme is more.
URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.\-]+:/|data:)")
_ONE_SLASH = re.compile(r"^([^/]+:/)(?!/)")
BLOCK = 2**20
_BASE64 = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)


def plain(source: object, limits: MediaLimits) -> object:
    """Return the bytes of a buffer, an open binary file or a `data:` URL; anything else unchanged."""
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if callable(getattr(source, "read", None)):
        return _read_open_file(source, limits)
    if isinstance(source, str) and (head := _BASE64.match(source)):
        limits.check_file("data: URL", (len(source) - head.end()) * 3 // 4)
        try:
            return base64.b64decode(source[head.end() :], validate=True)
        except ValueError as error:
            raise MediaError(
                "data: URL: damaged, not base64 behind its comma. Encode the file again."
            ) from error
    return source


def _read_open_file(file: Any, limits: MediaLimits) -> bytes:
    name = getattr(file, "name", type(file).__name__)
    try:
        start = file.tell() if file.seekable() else None
        if start is not None:
            file.seek(0)
        blocks = list(_blocks(file, name, limits.max_file_bytes))
        if start is not None:
            file.seek(start)
    except VlexportError:
        raise
    except Exception as error:
        # Readers of archives and of others raise what they like.
        raise shortage(error) or MediaError(
            f"{name}: an open file that cannot be read ({str(error) or type(error).__name__}). Open it again "
            "as 'rb', and check that it is whole."
        ) from error
    return b"".join(blocks)


def _blocks(file: Any, name: str, most: int) -> Iterator[bytes]:
    """Yield the content up to one byte over a limit; one read of an unbuffered pipe gives a part of it."""
    left = most + 1
    while left and (block := file.read(min(left, BLOCK))) != b"":
        if not isinstance(block, bytes):
            form = "as text" if isinstance(block, str) else "without waiting for its content"
            raise MediaError(f"{name}: a file opened {form} given, bytes expected. Open it as 'rb'.")
        left -= len(block)
        yield block


def name_of(source: Path | str | bytes) -> str:
    """Return the name of a source in messages, without its content, as valid UTF-8."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    return str(source).encode("utf-8", "backslashreplace").decode()


def open_source(source: Path | str | bytes, limits: MediaLimits) -> BinaryIO:
    """Open a source as a real file; bytes are written to an unnamed one."""
    if not isinstance(source, bytes):
        return _open_file(source, limits)
    limits.check_file(name_of(source), len(source))
    if not source:
        raise MediaError("0 bytes: empty. Pass the whole content of a media file.")
    held = tempfile.TemporaryFile()  # noqa: SIM115
    held.write(source)
    held.seek(0)
    return held


def _open_file(source: Path | str, limits: MediaLimits) -> BinaryIO:
    if URL.match(str(source)):
        url = _ONE_SLASH.sub(r"\1/", str(source))[:200]
        raise MediaError(
            f"{url}: a URL, a local file expected. vlexport opens no network "
            "connections; download it first and pass the file."
        )
    if not str(source):
        raise MediaError("an empty text given as a path. Pass a media file that exists and may be read.")
    try:
        # Without O_NONBLOCK a named pipe would wait here for a writer.
        descriptor = os.open(source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise shortage(error) or MediaError(
            f"{source}: {reason}. Pass a media file that exists and may be read."
        ) from error
    try:
        _check_status(str(source), os.fstat(descriptor), limits)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_status(name: str, status: os.stat_result, limits: MediaLimits) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise MediaError(f"{name}: {kind}, a regular file expected. Pass one media file.")
    if status.st_size == 0:
        raise MediaError(f"{name}: empty. Pass a media file with content.")
    limits.check_file(name, status.st_size)


def read_source(source: Path | str | bytes, limits: MediaLimits) -> bytes:
    """Return the whole content of a source."""
    if isinstance(source, bytes) and source:
        limits.check_file(name_of(source), len(source))
        return source
    with open_source(source, limits) as opened:
        # A file that grows while it is read stays within the limit.
        data = opened.read(min(limits.max_file_bytes, os.fstat(opened.fileno()).st_size) + 1)
    limits.check_file(name_of(source), len(data))
    return data
