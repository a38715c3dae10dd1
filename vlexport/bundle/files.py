"""Reading inside one folder: plain files only, no link followed, and the bytes handed out are those hashed.

Where the system opens relative to an open folder (Linux, macOS), every step is taken from the folder before,
so a link that is swapped in during the walk is refused as well; elsewhere each step is looked at first.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vlexport.errors import BundleError, InputError

MANIFEST_NAME = "manifest.json"
# Where a build keeps what it read back from the network that its library made; few backends have one.
NETWORK_NAME = "network.json"
MAX_FILES = 10_000

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
_MAX_LENGTH, _MAX_PARTS = 240, 8
# Device names on Windows, with any extension.
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of one payload."""

    size: int
    sha256: str

    def __post_init__(self) -> None:
        check_digest(self.sha256, "files.sha256")
        if self.size < 0:
            raise InputError(f"files.size: {self.size} given; expected a count of bytes.")


def check_digest(digest: str, where: str) -> str:
    """Return a digest unchanged; anything but 64 lower-case hexadecimal digits is an `InputError`."""
    if not _SHA256.fullmatch(digest):
        raise InputError(
            f"{where}: {digest[:80]!r} given; expected the 64 lower-case hex digits of a SHA-256."
        )
    return digest


def check_part(part: str, what: str) -> str:
    """Return one path component unchanged; one that could mean something else is an `InputError`."""
    if not _PART.fullmatch(part) or part.endswith(".") or _DEVICES.fullmatch(part):
        raise InputError(
            f"{what} {part[:120]!r} given; expected up to 100 letters, digits and . _ + - that do not begin "
            f"or end with a dot and are no device name. Rename it."
        )
    return part


def check_name(name: str) -> str:
    """Return a relative name with forward slashes unchanged; refuse one that leaves the folder."""
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
    """Refuse payload names that are illegal, the manifest's, or equal but for case."""
    seen: dict[str, str] = {MANIFEST_NAME: MANIFEST_NAME}
    for name in names:
        other = seen.setdefault(check_name(name).lower(), name)
        if other != name or name == MANIFEST_NAME:
            raise InputError(
                f"file name {name!r} given together with {other!r}; expected names that differ without case."
            )
    if len(seen) > MAX_FILES:
        raise InputError(f"{len(seen)} files given; expected at most {MAX_FILES}.")


def read_file(root: Path, name: str, limit: int) -> bytes:
    """Return the whole file; refuse one larger than `limit` bytes."""
    with translated(root, name), opened(root, name) as (file, size):
        if size > limit:
            raise BundleError(f"{root}: '{name}' has {size} bytes; expected at most {limit}. {_ADVICE}")
        return _exactly(file, size, root, name)


def read_payload(root: Path, name: str, record: FileRecord) -> bytes:
    """Return the bytes of a payload, hashed in this very buffer."""
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
    """Return size and hash of a file."""
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
    """Refuse a folder that holds anything but the manifest and `files`, plain and of the recorded size."""
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
    """Return name and size of every file in the folder and below; refuse anything but plain files."""
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
    """Open a file for reading, checked before and after opening; yields it with its size."""
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
    """Turn what the system or the name rule refuses into a `BundleError` about this file."""
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
