"""The folder of builds: entries appear whole, are found again by their key, and are never half there.

An entry is made in a hidden folder next to its place, synced, then renamed. A lock keeps two builders
from doing the same work, as a courtesy: without it both would finish, and one entry would remain, whole.
An interrupted build leaves its engine in its folder, if that was finished, and the next build of the key goes
on from there.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from vlexport.bundle import files
from vlexport.bundle.bundle import Bundle
from vlexport.bundle.files import MANIFEST_NAME, FileRecord, check_part
from vlexport.bundle.manifest import DIGITS, BuildKey, Manifest, entry_path, key_of
from vlexport.bundle.trust import Trust
from vlexport.errors import BundleError, LockedError, RequestError
from vlexport.system import check_room, explained, make_folder, replacing, write_synced

logger = logging.getLogger(__name__)

_PREFIX = ".staging-"
# Of builders on other machines, or without locks, nobody knows whether they live; no build takes this long.
_ABANDONED_SECONDS = 24 * 3600.0
_MAX_ATTEMPTS = 20
_OWN: set[Path] = set()
_ENGINE = "bundle"
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
_MAX_RENAMES = 100


def finished(path: Path, key: str, *, user_data: Path | None = None) -> Bundle | None:
    """Return the entry at `path` if it can be used: intact, trusted, of this key, and not failed in parity.

    Payloads are hashed when they are read. Anything else counts as absent, and the next build replaces it.
    """
    if not path.is_dir():
        return None
    try:
        bundle = Bundle.open(path, verify="lazy", user_data=user_data)
    except (BundleError, RequestError) as error:
        logger.warning("the entry is built again: %s", error)
        return None
    if bundle.manifest.key != key or bundle.verdict.status == "failed":
        return None
    return bundle


def entry_for(into: Path, build: BuildKey, model: str) -> Path:
    """Return the path of a build's entry: of the one that is there, from another folder of its model too."""
    key = key_of(build)
    for folder in sorted(into.glob(f"*-{key[:DIGITS]}")):
        try:
            manifest = Bundle.inspect(folder).manifest if (folder / MANIFEST_NAME).is_file() else None
        except BundleError as error:
            logger.debug("no entry: %s", error)
            continue
        if manifest is not None and manifest.key == key:
            return folder
    return entry_path(into, build, model)


def tags_of(path: Path) -> list[Path]:
    """Return the links beside a bundle that name it."""
    # `Path.resolve` raises for a loop of links, before Python 3.13.
    real = os.path.realpath(path)
    links = (link for link in sorted(path.parent.iterdir()) if link.is_symlink())
    return [link for link in links if os.path.realpath(link) == real]


def is_tag(link: Path) -> bool:
    """Return whether this is a link to a bundle beside it, which may be gone."""
    if not link.is_symlink():
        return False
    target = link.parent / link.readlink()
    beside = os.path.realpath(target.parent) == os.path.realpath(link.parent)
    return beside and (not target.exists() or (target / MANIFEST_NAME).is_file())


def check_tag(into: Path, name: str) -> Path:
    """Return the link that a tag is; refuse a name that something else has."""
    link = into / check_part(name, "name")
    if os.path.lexists(link) and not is_tag(link):
        raise RequestError(f"{link}: no tag; expected a free name, or one that a tag has. Choose another.")
    return link


def tag(path: Path, name: str) -> Path:
    """Name a bundle by a link beside it; a name that another bundle had is moved."""
    path = path.resolve()
    link = check_tag(path.parent, name)
    with explained(path.parent), replacing(link) as temporary:
        temporary.symlink_to(path.name)
    return link


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """A build in the making: write payloads below `folder`, then `publish`. Unpublished, it disappears.

    kept   the manifest of the engine that an interrupted build of the key left in `folder`, if one did
    """

    folder: Path
    final: Path
    user_data: Path | None
    kept: Manifest | None = None

    @property
    def scratch(self) -> Path:
        return self.folder.parent

    def files(self) -> dict[str, FileRecord]:
        names = files.listing(self.folder)
        return {name: files.record_of(self.folder, name) for name in names if name != MANIFEST_NAME}

    def add(self, name: str, content: bytes) -> FileRecord:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(content)
        return files.record_of(self.folder, name)

    def keep(self, manifest: Manifest) -> Bundle:
        self._write(manifest)
        Trust.of(self.user_data).record(manifest.digest(), "built")
        return Bundle(path=self.folder, manifest=manifest, digest=manifest.digest())

    def publish(self, manifest: Manifest) -> Bundle:
        """Put the build in its place, whatever is there, and vouch for it. Ends the staging."""
        self._write(manifest)
        _sync_tree(self.folder)
        # Before the rename: whoever sees the entry may trust it.
        Trust.of(self.user_data).record_of(manifest.digest(), "built", self.final)
        put_in_place(self.folder, self.final)
        return Bundle(path=self.final, manifest=manifest, digest=manifest.digest())

    def _write(self, manifest: Manifest) -> None:
        # In one step, and not again where it is there: a build that is killed meanwhile is gone on with.
        path, content = self.folder / MANIFEST_NAME, manifest.encoded()
        if path.is_symlink() or not path.exists() or path.read_bytes() != content:
            write_synced(path, content)
        files.check_listing(self.folder, manifest.files)
        for name in manifest.files:
            files.fix(self.folder / name)


@contextmanager
def staged(  # noqa: PLR0913
    into: Path,
    name: str,
    *,
    key: str | None = None,
    wait_seconds: float = 600.0,
    need: int = 0,
    user_data: Path | None = None,
) -> Iterator[Staging]:
    """Make a staging for the entry `into/name`; it is removed at the end, published or not.

    With a `key`, what an interrupted build of it kept is taken over. `need` is how many bytes the build will
    write: less room is a `ResourceError` at once, as is a disk that fills up later. Another builder of the
    entry is waited for; after `wait_seconds` a `LockedError` names it. Call `finished` again inside: the
    builder that was waited for may have done the work.
    """
    check_part(name, "entry name")
    with explained(into, need):
        make_folder(into)
        check_room(into, need)
        with _entry_lock(into, name, wait_seconds) as held, working_folder(into, name) as scratch:
            folder = scratch / _ENGINE
            kept = _take_over(folder, unfinished(into, name), key, held, user_data) if key else None
            _remove_leftovers(into, name, held=held)
            folder.mkdir(exist_ok=True)
            with explained(into, need, scratch):
                yield Staging(folder=folder, final=into / name, user_data=user_data, kept=kept)


@contextmanager
def _entry_lock(into: Path, name: str, wait_seconds: float) -> Iterator[bool]:
    path = _lock_of(into, name)
    lock, held = FileLock(path), True
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("%s: waiting for %s", into / name, _holder(into, name))
            lock.acquire(timeout=wait_seconds)
    except Timeout as error:
        raise LockedError(
            f"{into / name}: {_holder(into, name)} is building it and did not finish within {wait_seconds:g} "
            "s. Wait for it, or end it and build again."
        ) from error
    except NotImplementedError:
        # What filelock raises where the file system cannot lock.
        logger.warning("%s: this file system has no locks; two builds of one entry may both run", into)
        held = False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise LockedError(
                f"{path}: a link or a folder; expected a lock file. Remove it, then build again."
            ) from error
        raise
    try:
        yield held
    finally:
        lock.release()


def _lock_of(into: Path, name: str) -> Path:
    return into / f".lock-{name}"


def _holder(into: Path, name: str) -> str:
    words = [
        f"process {build.pid}" + ("" if build.host == _host() else " of another machine or container")
        for build in unfinished(into, name)
    ]
    return ", ".join(words) or "another process"


@contextmanager
def working_folder(into: Path, entry: str) -> Iterator[Path]:
    """Make a private folder in `into` that is gone afterwards, unless interrupted with something to keep."""
    folder = into / f"{_PREFIX}{entry}-{_host()}-{os.getpid()}-{secrets.token_hex(8)}"
    _OWN.add(folder)
    keeping = False
    try:
        folder.mkdir(mode=0o700)
        yield folder
    except BaseException as error:
        keeping = _has_engine(folder) and not isinstance(error, Exception)
        raise
    finally:
        if keeping:
            logger.warning("the engine is built and kept; the same build goes on from there")
            for path in folder.iterdir():
                if path.name != _ENGINE:
                    _remove(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        else:
            _remove(folder)
        _OWN.discard(folder)


def remove_own() -> None:
    """Remove this process's working folders before it ends; again, as other threads may still write."""
    for folder in itertools.filterfalse(_has_engine, _OWN.copy()):
        for _ in range(_MAX_ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break


def _take_over(
    folder: Path, left: list[Unfinished], key: str, held: bool, user_data: Path | None
) -> Manifest | None:
    """Move a dead builder's engine of the key to `folder`, if it is this user's and every byte as hashed."""
    for builder in left:
        engine = builder.folder / _ENGINE
        if not builder.is_abandoned(held=held) or engine.is_symlink():
            continue
        try:
            bundle = Bundle.open(engine, user_data=user_data)
        except (BundleError, RequestError) as error:
            logger.debug("no engine to go on from: %s", error)
            continue
        if bundle.manifest.key == key and bundle.manifest.parity.status == "not_run":
            engine.rename(folder)
            return bundle.manifest
    return None


def _has_engine(folder: Path) -> bool:
    return (folder / _ENGINE / MANIFEST_NAME).is_file()


def remove_leftovers(into: Path, entry: str) -> None:
    """Remove what builders that died after they published an entry left, unless somebody builds it now."""
    if not unfinished(into, entry):
        return
    if not _lock_of(into, entry).exists():
        # Of a pull, which nobody locks; a lock of ours would stay behind.
        _remove_leftovers(into, entry, held=True)
        return
    try:
        with _entry_lock(into, entry, 0.0) as held:
            _remove_leftovers(into, entry, held=held)
    except (LockedError, OSError) as error:
        # The entry is usable all the same, in a folder of others too.
        logger.debug("what a build left stays: %s", error)


def _remove_leftovers(into: Path, entry: str, *, held: bool) -> None:
    for build in unfinished(into, entry):
        # Some file systems let everybody hold a lock, so the process counts too.
        if build.is_abandoned(held=held):
            _remove(build.folder)


def _is_alive(folder: Path, pid: int) -> bool:
    if pid == os.getpid() or os.name != "posix":
        # By name: another thread may write the path of the folder in another way.
        return folder.name in {own.name for own in _OWN.copy()}
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        logger.debug("process %d belongs to another user", pid)
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """The working folder of a build, and the machine and the process that made it."""

    folder: Path
    entry: str
    host: str
    pid: int

    @property
    def has_engine(self) -> bool:
        """True if its builder finished the engine, which the next build of the key takes over."""
        return _has_engine(self.folder)

    def is_abandoned(self, *, held: bool = True) -> bool:
        """Return whether its builder has ended, as far as this machine knows (`held`: the lock is)."""
        try:
            age = time.time() - self.folder.stat().st_mtime
        except FileNotFoundError:
            return False
        ended = held and self.host == _host() and not _is_alive(self.folder, self.pid)
        return ended or age > _ABANDONED_SECONDS

    def remove(self) -> None:
        _remove(self.folder)


def unfinished(into: Path, entry: str | None = None) -> list[Unfinished]:
    """Return the working folders of an entry, or of all."""
    folders = []
    for folder in sorted(into.glob(f"{_PREFIX}*")):
        words = folder.name.removeprefix(_PREFIX).rsplit("-", 3)
        ours = len(words) == 4 and words[2].isdecimal() and not folder.is_symlink()
        if ours and entry in (None, words[0]):
            folders.append(Unfinished(folder=folder, entry=words[0], host=words[1], pid=int(words[2])))
    return folders


def remove_entry(into: Path, name: str) -> None:
    """Remove an entry, first from its place in one step; a `LockedError` while somebody builds it."""
    check_part(name, "entry name")
    with explained(into), _entry_lock(into, name, 0.0), working_folder(into, name) as scratch:
        # Somebody else may have removed it.
        with suppress(FileNotFoundError):
            (into / name).rename(scratch / "removed")
        # A tag that was moved to another bundle meanwhile is none of it.
        for link in tags_of(into / name):
            link.unlink(missing_ok=True)


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        logger.debug("%s was removed by somebody else", folder)
    except OSError as error:
        logger.warning(
            "%s: the working folder could not be removed (%s); remove it by hand", folder, error.strerror
        )


def _sync_tree(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _sync_tree(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                _sync(Path(entry.path))
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    # Windows keeps the names in a folder by itself.
    if os.name == "posix":
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(folder: Path, final: Path) -> None:
    """Move `folder` to `final`; readers find the old entry or the new one, or none between two renames."""
    for attempt in range(_MAX_RENAMES):
        try:
            folder.rename(final)
            break
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
        try:
            final.rename(folder.parent / f"replaced{attempt}")
        except FileNotFoundError:
            logger.debug("another builder was faster")
    else:
        raise BundleError(f"{final}: other builders kept replacing it. Wait for them, then build again.")
    _sync_folder(final.parent)
