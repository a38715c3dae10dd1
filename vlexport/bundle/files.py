"""Reading inside one folder: plain files only, no link followed, and the bytes handed out are those hashed.

Where the system opens relative to an open folder (Linux, macOS), every step is taken from the folder before,
so a link that is swapped in during the walk is refused as well; elsewhere each step is looked at first.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vlexport.bundle.manifest import FileRecord
from vlexport.bundle.names import MANIFEST_NAME, MAX_FILES, check_name
from vlexport.errors import BundleError, InputError

_RELATIVE_OPEN = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
# Non-blocking: opening a FIFO would wait for its writer for ever.
_FILE_FLAGS = (
    os.O_RDONLY
    | _NOFOLLOW
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
_CHUNK = 1 << 20
_ADVICE = "Build the bundle again or fetch an intact copy."


def read_file(root: Path, name: str, limit: int) -> bytes:
    """The whole file, refused when it is larger than `limit` bytes."""
    with translated(root, name), opened(root, name) as (file, size):
        if size > limit:
            raise BundleError(f"{root}: '{name}' has {size} bytes; expected at most {limit}. {_ADVICE}")
        return _exactly(file, size, root, name)


def read_payload(root: Path, name: str, record: FileRecord) -> bytes:
    """The bytes of a payload, hashed in the buffer that is returned."""
    with translated(root, name), opened(root, name) as (file, size):
        _check_size(root, name, size, record)
        data = _exactly(file, size, root, name)
    _check_hash(root, name, hashlib.sha256(data).hexdigest(), record)
    return data


def check_payload(root: Path, name: str, record: FileRecord) -> None:
    """Hash a payload without keeping it."""
    found = record_of(root, name)
    _check_size(root, name, found.size, record)
    _check_hash(root, name, found.sha256, record)


def record_of(root: Path, name: str) -> FileRecord:
    """Size and hash of a file as it lies there."""
    digest, size = hashlib.sha256(), 0
    with translated(root, name), opened(root, name) as (file, _):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size=size, sha256=digest.hexdigest())


def copy_payload(root: Path, name: str, record: FileRecord, copy: Path) -> None:
    """Copy a payload to a path that does not exist yet; what is hashed is the copy."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | getattr(os, "O_BINARY", 0)
    with opened(root, name) as (file, size), os.fdopen(os.open(copy, flags, 0o600), "wb") as out:
        _check_size(root, name, size, record)
        while chunk := file.read(_CHUNK):
            out.write(chunk)
    try:
        check_payload(copy.parent, copy.name, record)
    except BundleError as error:
        copy.unlink()
        raise BundleError(f"{root}: '{name}' was altered. {error}") from error


def check_listing(root: Path, files: Mapping[str, FileRecord]) -> None:
    """The folder holds the manifest and exactly `files`, all plain and of the recorded size."""
    found = listing(root)
    missing, extra = sorted(set(files) - set(found)), sorted(set(found) - set(files) - {MANIFEST_NAME})
    if missing or extra:
        raise BundleError(
            f"{root}: missing {_some(missing)}, not in the manifest: {_some(extra)}; expected exactly the "
            f"{len(files)} files that the manifest names. {_ADVICE}"
        )
    for name, record in files.items():
        _check_size(root, name, found[name], record)


def listing(root: Path) -> dict[str, int]:
    """Name and size of every file in the folder and below; anything but plain files is a `BundleError`."""
    found: dict[str, int] = {}
    with translated(root, "."):
        for name, entry in _walk(root, ""):
            check_plain(root, name, entry)
            found[name] = entry.st_size
            if len(found) > MAX_FILES:
                raise BundleError(
                    f"{root}: more than {MAX_FILES} files; expected a bundle. Give another folder."
                )
    return found


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = check_name(prefix + entry.name)
            if not entry.is_dir(follow_symlinks=False):
                yield name, os.lstat(entry.path)
                continue
            inside = list(_walk(Path(entry.path), name + "/"))
            if not inside:
                raise BundleError(f"{folder}: folder {name!r} is empty; expected files only. {_ADVICE}")
            yield from inside


def check_plain(root: Path, name: str, found: os.stat_result) -> None:
    """Refuse links, devices, pipes and files that have a second name somewhere."""
    if not stat.S_ISREG(found.st_mode):
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "a folder, a pipe or a device"
        raise BundleError(f"{root}: '{name}' is {kind}; a bundle holds plain files only. {_ADVICE}")
    if found.st_nlink > 1:
        raise BundleError(
            f"{root}: '{name}' is hard-linked {found.st_nlink} times, so it can change from outside the "
            "folder; expected one name. Copy the folder without --link."
        )


@contextmanager
def opened(root: Path, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """The file open for reading, with its size; looked at before and after opening."""
    with translated(root, name):
        *parents, last = check_name(name).split("/")
        step = _open_relative if _RELATIVE_OPEN else _open_stepwise
        descriptor = step(root, parents, last)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        check_plain(root, name, found)
        yield file, found.st_size


def _open_relative(root: Path, parents: list[str], last: str) -> int:
    folder = os.open(root, _FOLDER_FLAGS)
    try:
        for parent in parents:
            inner = os.open(parent, _FOLDER_FLAGS | _NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Merely opening a device can have effects.
        check_plain(root, last, os.stat(last, dir_fd=folder, follow_symlinks=False))
        return os.open(last, _FILE_FLAGS, dir_fd=folder)
    finally:
        os.close(folder)


def _open_stepwise(root: Path, parents: list[str], last: str) -> int:
    folder = root
    for parent in parents:
        folder = folder / parent
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise BundleError(f"{root}: '{parent}' is no plain folder. {_ADVICE}")
    check_plain(root, last, os.lstat(folder / last))
    return os.open(folder / last, _FILE_FLAGS)


@contextmanager
def translated(root: Path, name: str) -> Iterator[None]:
    """What the system or the name rule refused, as a `BundleError` about this file."""
    try:
        yield
    except InputError as error:
        raise BundleError(f"{root}: {error}") from error
    except OSError as error:
        shown = name[:120] if name != "." else str(root)
        raise BundleError(f"{root}: '{shown}' cannot be read ({error.strerror}). {_ADVICE}") from error


def _exactly(file: BinaryIO, size: int, root: Path, name: str) -> bytes:
    data = file.read(size)
    if len(data) != size or file.read(1):
        raise BundleError(
            f"{root}: '{name}' changed size while it was read; expected {size} bytes. Try again."
        )
    return data


def _check_size(root: Path, name: str, size: int, record: FileRecord) -> None:
    if size != record.size:
        raise BundleError(f"{root}: '{name}' has {size} bytes; expected {record.size}. {_ADVICE}")


def _check_hash(root: Path, name: str, sha256: str, record: FileRecord) -> None:
    if sha256 != record.sha256:
        raise BundleError(f"{root}: '{name}' has SHA-256 {sha256}; expected {record.sha256}. {_ADVICE}")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name[:80]) for name in names[:5]) + rest if names else "nothing"
