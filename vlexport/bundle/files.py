"""Reading inside one folder: plain files only, no link followed, and the bytes handed out are those hashed.

Where the system opens relative to an open folder (Linux, macOS), every step is taken from the folder before,
so a link that is swapped in during the walk is refused as well; elsewhere each step is looked at first.
Large files have a digest for each part too, so that every processor hashes some of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from vlexport.errors import BundleError, InputError
from vlexport.system import MappedFile, shortage

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
# Bytes of a part with a digest of its own, of files that are larger.
PART = 1 << 26
# Files from this size on are published read-only and may be mapped.
MAPPED_FROM = 1 << 24
_ADVICE = "Build the bundle again or fetch an intact copy."


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of one payload, and of each of its parts if it has several."""

    size: int
    sha256: str
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for digest in (self.sha256, *self.parts):
            check_digest(digest, "files.sha256")
        if self.size < 0:
            raise InputError(f"files.size: {self.size} given; expected a count of bytes.")
        count = -(-self.size // PART) if self.size > PART else 0
        if len(self.parts) != count:
            raise InputError(
                f"files.parts: {len(self.parts)} digests given; {count} expected, one for every {PART} bytes "
                "of a file that has more."
            )

    def require(self, root: Path, name: str, content: memoryview | Read) -> None:
        spans = parts_of(self.size) or [(0, self.size)]
        for digest, expected in zip(_digests(content, spans), self.parts or (self.sha256,), strict=True):
            if digest != expected:
                raise BundleError(f"{root}: '{name}' has SHA-256 {digest}; expected {expected}. {_ADVICE}")


# Returns so many bytes from an offset on; several threads call it.
Read = Callable[[int, int], bytes]


def parts_of(size: int) -> list[tuple[int, int]]:
    """Return begin and end of the parts of a file; none of one that is no larger than a part."""
    return [(begin, min(begin + PART, size)) for begin in range(0, size, PART)] if size > PART else []


def _digests(content: memoryview | Read, spans: Sequence[tuple[int, int]]) -> list[str]:
    def digest(span: tuple[int, int]) -> str:
        at, end = span
        if isinstance(content, memoryview):
            # In one go: between two pieces it would wait for other threads of Python.
            return hashlib.sha256(content[at:end]).hexdigest()
        hashed = hashlib.sha256()
        while at < end and (chunk := content(at, min(_CHUNK, end - at))):
            hashed.update(chunk)
            at += len(chunk)
        return hashed.hexdigest()

    if len(spans) == 1:
        return [digest(spans[0])]
    with ThreadPoolExecutor(min(len(spans), os.cpu_count() or 1)) as pool:
        return list(pool.map(digest, spans))


def _reader(file: BinaryIO) -> Read:
    lock = Lock()

    def read(begin: int, count: int) -> bytes:
        with lock:
            file.seek(begin)
            return file.read(count)

    return read


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
    record.require(root, name, memoryview(data))
    return data


def map_payload(root: Path, name: str, record: FileRecord) -> memoryview:
    """Return the bytes of a payload, hashed where they will be used: mapped if nobody may write, or read.

    A file may be mapped that is this user's or root's and has no permission to write for anybody: its bytes
    stay what they were when they were hashed, and processes share them. To change such a file in place
    takes a user who can run programs in this one's name.
    """
    with translated(root, name), opened(root, name) as (file, size):
        _check_size(root, name, size, record)
        if not _is_fixed(os.fstat(file.fileno())):
            return memoryview(read_payload(root, name, record))
        view = memoryview(MappedFile(file.fileno(), size))
    record.require(root, name, view)
    return view


def _is_fixed(status: os.stat_result) -> bool:
    owned = os.name == "posix" and status.st_uid in (0, os.geteuid())
    return owned and status.st_size >= MAPPED_FROM and not stat.S_IMODE(status.st_mode) & 0o222


def fix(path: Path) -> None:
    """Take everybody's permission to write a large file; it can still be replaced and removed."""
    status = path.stat()
    if os.name == "posix" and status.st_size >= MAPPED_FROM:
        path.chmod(stat.S_IMODE(status.st_mode) & ~0o222)


def check_payload(root: Path, name: str, record: FileRecord) -> None:
    """Hash a payload without keeping it."""
    with translated(root, name), opened(root, name) as (file, size):
        _check_size(root, name, size, record)
        record.require(root, name, _reader(file))
        _check_size(root, name, os.fstat(file.fileno()).st_size, record)


def record_of(root: Path, name: str) -> FileRecord:
    """Return size and digests of a file."""
    with translated(root, name), opened(root, name) as (file, size):
        whole, *parts = _digests(_reader(file), [(0, size), *parts_of(size)])
    return FileRecord(size=size, sha256=whole, parts=tuple(parts))


def copy_payload(root: Path, name: str, record: FileRecord, copy: Path, mode: int = 0o600) -> None:
    """Copy a payload to a path that does not exist yet; what is hashed is the copy."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | getattr(os, "O_BINARY", 0)
    with opened(root, name) as (file, size), os.fdopen(os.open(copy, flags, mode), "wb") as out:
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
    sizes = listing(root)
    missing, extra = sorted(set(files) - set(sizes)), sorted(set(sizes) - set(files) - {MANIFEST_NAME})
    if missing or extra:
        raise BundleError(
            f"{root}: missing {_some(missing)}, not in the manifest: {_some(extra)}; expected exactly the "
            f"{len(files)} files that the manifest names. {_ADVICE}"
        )
    for name, record in files.items():
        _check_size(root, name, sizes[name], record)


def listing(root: Path) -> dict[str, int]:
    """Return name and size of every file in the folder and below; refuse anything but plain files."""
    sizes: dict[str, int] = {}
    with translated(root, "."):
        for name, entry in _walk(root, ""):
            check_plain(root, name, entry)
            sizes[name] = entry.st_size
            if len(sizes) > MAX_FILES:
                raise BundleError(
                    f"{root}: more than {MAX_FILES} files; expected a bundle. Give another folder."
                )
    return sizes


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


def check_plain(root: Path, name: str, status: os.stat_result) -> None:
    """Refuse links, devices, pipes and files that have a second name somewhere."""
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "a folder, a pipe or a device"
        raise BundleError(f"{root}: '{name}' is {kind}; a bundle holds plain files only. {_ADVICE}")
    if status.st_nlink > 1:
        raise BundleError(
            f"{root}: '{name}' is hard-linked {status.st_nlink} times, so it can change from outside the "
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
        status = os.fstat(descriptor)
        check_plain(root, name, status)
        yield file, status.st_size


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
        damaged = BundleError(f"{root}: '{shown}' cannot be read ({error.strerror}). {_ADVICE}")
        raise shortage(error) or damaged from error


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


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name[:80]) for name in names[:5]) + rest if names else "nothing"
