"""The system below: failures of the machine in the errors of any library, files, memory and processes.

A process that is started here imports from where this one does, and nothing from the folder in which it runs.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import secrets
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Self

from vlexport.errors import RequestError, ResourceError, VlexportError

_FULL = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# Allocators of torch, ONNX Runtime and the C++ library, threads that found no memory for their stack, and the
# loader of libraries, whose words become an `ImportError` without a number.
_MEMORY = re.compile(
    r"can(?:'|no)t allocate|not enough memory|out of memory|bad.?alloc|failed to allocate|start new thread"
    r"|failed to map segment from shared object(?!: operation not permitted)",
    re.IGNORECASE,
)
# Rust's and C's words for ENOSPC, EFBIG and EDQUOT.
_DISK = re.compile(r"os error (?:28|27|122)\)|no space left|file too large|quota exceeded", re.IGNORECASE)
# A library that wraps a failed write into its own error leaves less room than this behind.
_ROOM = 16 << 20
# Programs that torch has unpacked and loaded, by their place in /proc/self/maps.
_UNPACKED = re.compile(r"(/.*?/aotinductor_\w{6})/")
# Those that libraries start in such a process are like it.
SAFE = {"PYTHONSAFEPATH": "1"}
CACHES = "TORCHINDUCTOR_CACHE_DIR"
# torch traces one program at a time, and the variables above hold for the whole process.
ONE_BUILD = RLock()
# Held while they are changed, or read all at once.
VARIABLES = RLock()
# Between two releases of mapped pages: at 1 GB/s they grow by 20 MB meanwhile.
RELEASE_SECONDS = 0.02
# Searching all objects for cycles takes a quarter of a second.
WORTH_A_SEARCH = 2**26


def is_full(error: BaseException) -> bool:
    """Return whether the disk, the quota or a file's size limit ended a write."""
    return (isinstance(error, OSError) and error.errno in _FULL) or bool(_DISK.search(_said(error)))


def _said(error: BaseException) -> str:
    """Return an error's words, without the files that the system names in them."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def check_folder(into: Path) -> None:
    """Refuse a path for bundles that is no folder and where none can be made; nothing is made."""
    try:
        place = next(place for place in (into, *into.absolute().parents) if place.exists())
    except OSError as error:
        raise shortage(error) or _no_folder(into, error) from error
    if not place.is_dir():
        raise RequestError(f"{into}: {place} is a file; a folder is expected. Name another one.")


def make_folder(into: Path) -> None:
    """Make the folder for bundles; where the system has none, the path is a wrong request."""
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full(error) or error.errno in _FORBIDDEN:
            raise
        raise shortage(error) or _no_folder(into, error) from error


def _no_folder(into: Path, error: OSError) -> RequestError:
    return RequestError(
        f"{into}: no folder can be made there ({error.strerror}); expected one that you may "
        "write to. Name another one, or change its permissions."
    )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a place next to `path` to write to; it takes the place of `path` when the block succeeds."""
    # Names of up to 255 bytes have a temporary one too.
    start = os.fsdecode(os.fsencode(path.name)[:200])
    temporary = path.with_name(f".{start}.{secrets.token_hex(8)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all, in place of what is there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with (
        replacing(path) as temporary,
        os.fdopen(os.open(temporary, flags, mode), "wb") as file,
    ):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def check_room(path: Path, need: int) -> None:
    """Refuse before starting when the disk of `path` has less than `need` bytes free."""
    if free_bytes(path) < need:
        raise _full(path, "not enough room", need)


def free_bytes(path: Path) -> int:
    """Return the room on the disk of `path`, or of the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def explained(path: Path, need: int = 0, scratch: Path | None = None) -> Iterator[None]:
    """Raise what `shortage` returns for an error, and a `RequestError` for a forbidden write below `path`.

    Other failures pass unchanged; `need` is how many bytes the whole work takes, 0 where nobody knows.
    """
    try:
        yield
    except VlexportError:
        raise
    except (RuntimeError, OSError, MemoryError, ImportError) as error:
        if (short := shortage(error, path, scratch, need)) is not None:
            raise short from error
        if isinstance(error, OSError) and error.errno in _FORBIDDEN and _concerns(path, error):
            raise RequestError(
                f"{error.filename or path}: cannot be written ({error.strerror}); expected a folder that you "
                "may write to. Give another folder, or change its permissions."
            ) from error
        raise


def _concerns(path: Path, error: OSError) -> bool:
    names = [name for name in (error.filename, error.filename2) if isinstance(name, (str, os.PathLike))]
    return not names or any(Path(name).absolute().is_relative_to(path.absolute()) for name in names)


def _more_files() -> str:
    if os.name != "posix":
        return ""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = hard == resource.RLIM_INFINITY
    limit = max(4096, 4 * soft) if endless else min(max(4096, 4 * soft), hard)
    return f", or raise the limit: `ulimit -n {limit}`" if 0 <= soft < limit else ""


def raise_interruption(error: Exception) -> None:
    """Raise what interrupted the program, where an error follows from it: torch's contexts break on the way.

    Else a finding of a check would be kept that is none.
    """
    link: BaseException | None = error
    while link is not None:
        if not isinstance(link, (Exception, GeneratorExit)):
            raise link
        link = link.__cause__ or link.__context__


def shortage(
    error: BaseException, place: Path | None = None, scratch: Path | None = None, need: int = 0
) -> VlexportError | None:
    """Return what ran out, or which disk failed, if that is what the error means.

    `place` is how messages call a disk that is full, and `need` what it has to have room for.
    Where the error hides its reason, it is tried whether `scratch` still has room.
    """
    link: BaseException | None = error
    while link is not None:
        out_of_memory = isinstance(link, OSError) and link.errno == errno.ENOMEM
        if out_of_memory or isinstance(link, MemoryError) or _MEMORY.search(_said(link)):
            return ResourceError(
                f"out of memory ({_words(link)}). Give fewer or smaller media at once, build for a smaller "
                "profile, or free memory."
            )
        if is_full(link):
            return _full(place, _words(link), need)
        too_many = isinstance(link, OSError) and link.errno in _DESCRIPTORS
        if too_many or "too many open files" in _said(link).lower():
            return ResourceError(f"too many open files ({_words(link)}). Close some{_more_files()}.")
        if isinstance(link, OSError) and link.errno == errno.EIO:
            where = f"{link.filename}: " if link.filename is not None else ""
            return VlexportError(
                f"{where}{os.strerror(errno.EIO)}. Nothing half-written is kept; see to the disk, then run "
                "again."
            )
        link = link.__cause__ or link.__context__
    if scratch is not None and isinstance(error, RuntimeError) and not _has_room(scratch):
        return _full(place, _words(error), need)
    return None


def _full(place: Path | None, why: str, need: int = 0) -> ResourceError:
    where, room = "", ""
    if place is not None:
        needed = f"{need / 1e6:.1f} MB needed, " if need else ""
        where, room = f"{place}: ", f": {needed}{free_bytes(place) / 1e6:.1f} MB free"
    return ResourceError(
        f"{where}the disk is full, or a quota or size limit is reached ({why}){room}. Nothing half-written "
        "is kept. Free some space or give another folder."
    )


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _has_room(scratch: Path) -> bool:
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


def command(code: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs this code; `-c` by itself imports from the current folder."""
    flag = "-I" if sys.flags.isolated else "-P"
    return [sys.executable, flag, "-c", f"import sys; sys.path[:] = {_places()!a}; {code}", *arguments]


def environment() -> dict[str, str]:
    """Return the environment of such a process."""
    with VARIABLES:
        return {**os.environ, **SAFE}


@contextmanager
def compile_caches(folder: Path | None = None) -> Iterator[None]:
    """Keep the caches of torch's compiler in a private folder, a new one if none is given, unless one is set.

    torch makes its folder whenever it compiles or merely exports, in the temporary folder and for good. Its
    processes import nothing from the current folder.
    """
    with ExitStack() as stack:
        settings = dict(SAFE)
        with VARIABLES:
            if not os.environ.get(CACHES):
                place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
                settings[CACHES] = str(place / "torchinductor")
            unset = {name: value for name, value in settings.items() if not os.environ.get(name)}
            os.environ.update(unset)
        try:
            yield
        finally:
            with VARIABLES:
                for name in unset:
                    del os.environ[name]


def _places() -> list[str]:
    home = str(Path(__file__).parents[1])
    paths = [place for place in sys.path if Path(place).is_absolute()]
    return paths if home in paths else [*paths, home]


def unpacked() -> set[str]:
    """Return the folders of programs that torch has unpacked and loaded, where the system lists them."""
    try:
        mapped = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return set()
    return {folder for folder in _UNPACKED.findall(mapped) if Path(folder).is_dir()}


def give_back(size: int = WORTH_A_SEARCH) -> None:
    """Collect cycles, such as exported programs, and return memory to the system; `size` was let go of."""
    if size < WORTH_A_SEARCH:
        return
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # only the GNU library has it
            trim(0)


class MappedFile(mmap.mmap):
    """A file, mapped to be read; `path` opens it again, also where another one has its name by then.

    The path is None, and other mappings are not known, where the system does not list what a process has.
    """

    path: str | None

    def __new__(cls, descriptor: int, size: int = 0) -> Self:
        mapped = super().__new__(cls, descriptor, size, access=mmap.ACCESS_READ)
        own = os.dup(descriptor)
        weakref.finalize(mapped, os.close, own)
        mapped.path = path if Path(path := f"/dev/fd/{own}").exists() else None
        return mapped

    def release(self) -> None:
        """Let go of its pages in every mapping of this process."""
        self.madvise(mmap.MADV_DONTNEED)
        if sys.platform == "linux" and self.path is not None:
            # By name: file systems in layers list other numbers than `stat` has.
            name, library = str(Path(self.path).readlink()), ctypes.CDLL(None)
            for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
                place, access, _, _, _, *file = line.split(maxsplit=5)
                if access.startswith("r--") and file == [name]:
                    start, end = (int(border, 16) for border in place.split("-"))
                    pages = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
                    # Looked up right before: where a thread has unmapped it, memory of others may be next.
                    if Path(f"/proc/self/map_files/{start:x}-{end:x}").is_symlink():
                        library.madvise(*pages, mmap.MADV_DONTNEED)


@contextmanager
def released(mapped: memoryview) -> Iterator[None]:
    """Let go of mapped pages again and again while they are read, each of which is needed once."""
    ended = Event()

    def again() -> None:
        while not ended.wait(RELEASE_SECONDS):
            release(mapped)

    thread = Thread(target=again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        release(mapped)


def release(mapped: memoryview) -> None:
    """Let go of the pages of a mapped file; what is read again comes from the file."""
    if isinstance(mapped.obj, MappedFile) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.obj.release()
