"""The folder of builds: entries appear whole, are found again by their key, and are never half there.

An entry is made in a hidden folder beside its place, put on the disk, then renamed. A lock keeps two builders
from doing the same work, as a courtesy: without it both would finish, and one entry would remain, whole.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from vlexport.bundle import files
from vlexport.bundle.atomic import put_in_place, sync_tree, write_durably
from vlexport.bundle.bundle import Bundle
from vlexport.bundle.manifest import FileRecord, Manifest
from vlexport.bundle.names import MANIFEST_NAME, check_part
from vlexport.bundle.os_errors import check_room, explained, make_folder
from vlexport.bundle.staging import owners, remove_leftovers, working_folder
from vlexport.bundle.trust import Trust
from vlexport.errors import BundleError, LockedError, RequestError

logger = logging.getLogger(__name__)


def finished(path: Path, key: str, *, user_data: Path | None = None) -> Bundle | None:
    """The entry at `path` when it can be used again: intact, trusted, of this key, and not failed in parity.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """A build in the making: write payloads below `folder`, then `publish`. Unpublished, it disappears."""

    folder: Path
    final: Path
    user_data: Path | None

    @property
    def scratch(self) -> Path:
        """A private folder beside the payloads, which goes with the staging."""
        return self.folder.parent

    def files(self) -> dict[str, FileRecord]:
        """Size and hash of every payload written so far, for the manifest."""
        names = files.listing(self.folder)
        return {name: files.record_of(self.folder, name) for name in names if name != MANIFEST_NAME}

    def draft(self, manifest: Manifest) -> Bundle:
        """The build as a bundle that can be checked before it is published; nothing vouches for it yet."""
        self._write(manifest)
        return Bundle(path=self.folder, manifest=manifest, digest=manifest.digest())

    def publish(self, manifest: Manifest, *, overwrite: bool = False) -> Bundle:
        """Put the build in its place and vouch for it. Ends the staging.

        A usable entry of the same key that appeared meanwhile is kept and returned, unless `overwrite`.
        """
        self._write(manifest)
        present = None if overwrite else finished(self.final, manifest.key, user_data=self.user_data)
        if present is not None:
            return present
        sync_tree(self.folder)
        # Before the rename: whoever sees the entry may trust it.
        Trust.of(self.user_data).record(manifest.digest(), "built")
        aside = self.folder.parent / "replaced"
        aside.mkdir()
        put_in_place(self.folder, self.final, aside)
        return Bundle(path=self.final, manifest=manifest, digest=manifest.digest())

    def _write(self, manifest: Manifest) -> None:
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
        write_durably(self.folder / MANIFEST_NAME, manifest.encoded())
        files.check_listing(self.folder, manifest.files)


@contextmanager
def staged(
    into: Path, name: str, *, wait_seconds: float = 600.0, need: int = 0, user_data: Path | None = None
) -> Iterator[Staging]:
    """A new staging for the entry `into/name`; it is removed at the end, published or not.

    `need` is how many bytes the build will write: less room is a `ResourceError` at once, as is a disk that
    fills up later. Another builder of the entry is waited for; after `wait_seconds` a `LockedError` names it.
    Ask `finished` again inside: the builder that was waited for may have done the work.
    """
    check_part(name, "entry name")
    with explained(into, need):
        make_folder(into)
        check_room(into, need)
        with _courtesy_lock(into, name, wait_seconds):
            remove_leftovers(into, name)
            with working_folder(into, name) as scratch:
                folder = scratch / "bundle"
                folder.mkdir()
                yield Staging(folder=folder, final=into / name, user_data=user_data)


@contextmanager
def _courtesy_lock(into: Path, name: str, wait_seconds: float) -> Iterator[None]:
    path = into / f".lock-{name}"
    lock = FileLock(path)
    try:
        _acquire(lock, into, name, wait_seconds)
    except Timeout as error:
        raise LockedError(
            f"{into / name}: {_holder(into, name)} is building it and did not finish within {wait_seconds:g} "
            "s. Wait for it, or end it and build again."
        ) from error
    except NotImplementedError:
        # What filelock raises where the file system cannot lock.
        logger.warning("%s: this file system has no locks; two builds of one entry may both run", into)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise LockedError(
                f"{path}: a link or a folder; expected a lock file. Remove it, then build again."
            ) from error
        raise
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, into: Path, name: str, wait_seconds: float) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("%s: waiting for %s", into / name, _holder(into, name))
        lock.acquire(timeout=wait_seconds)


def _holder(into: Path, name: str) -> str:
    return ", ".join(str(owner) for owner in owners(into, name)) or "another process"
