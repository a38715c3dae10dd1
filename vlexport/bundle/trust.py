"""Records in the user's own data folder: bundles built here or approved, and later verdicts on bundles.

An engine is a program: a bundle is loaded only when the folder holds its manifest's digest. The verdict of
the build is in the manifest, under its digest. A later one is kept here, where nobody else can write: a
stranger's file next to a bundle grants nothing, and a digest does not change.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from vlexport.bundle.files import check_digest
from vlexport.bundle.manifest import Verdict
from vlexport.bundle.user_folders import CacheFile, user_data_folder
from vlexport.codec import MAX_BYTES, canonical, decode, encode, parse
from vlexport.errors import InputError, MisfitError, RequestError, UntrustedError, VlexportError
from vlexport.system import shortage, write_synced

logger = logging.getLogger(__name__)

_APPROVAL = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Records:
    """A private folder with one file for each digest of a manifest."""

    NAME: ClassVar[str]
    folder: Path

    @classmethod
    def of(cls, user_data: Path | None = None) -> Self:
        return cls(folder=(user_data or user_data_folder()) / cls.NAME)

    def _read(self, digest: str) -> bytes | None:
        path = self.folder / check_digest(digest, "digest")
        try:
            check_private(self.folder)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            # None, or that of somebody else.
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read(MAX_BYTES + 1)

    def _keep(self, digest: str, raw: bytes, what: str) -> None:
        path = self.folder / check_digest(digest, "digest")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self.folder)
            write_synced(path, raw, 0o600)
        except OSError as error:
            raise type(shortage(error) or RequestError())(_unwritable(path, what, error)) from error


class Trust(_Records):
    """Digests of bundles built or approved here; one that cannot be recorded is trusted by this process."""

    NAME = "trusted"
    _HELD: ClassVar[set[tuple[Path, str]]] = set()

    def probe(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self.folder)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(b"built\n")
        except OSError as error:
            logger.warning("%s", _unwritable(self.folder, "the trust in a bundle", error))

    def knows(self, digest: str) -> bool:
        check_digest(digest, "digest")
        if (self.folder, digest) in self._HELD:
            return True
        try:
            check_private(self.folder)
            return stat.S_ISREG(os.lstat(self.folder / digest).st_mode)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            # No folder, or that of somebody else.
            return False
        except OSError as error:
            raise shortage(error) or RequestError(
                f"{self.folder}: the record of trusted bundles cannot be read ({error.strerror}); expected a "
                "folder of your own. Give yourself access to it."
            ) from error

    def record(self, digest: str, how: Literal["built", "approved"]) -> None:
        try:
            self._keep(digest, f"{how}\n".encode(), "the trust in a bundle")
        except UntrustedError:
            raise
        except VlexportError as error:
            self._HELD.add((self.folder, digest))
            logger.debug("%s", error)

    def record_of(self, digest: str, how: Literal["built", "approved"], path: Path) -> None:
        self.record(digest, how)
        if (self.folder, digest) in self._HELD:
            logger.warning(
                "%s: trusted by this command alone, as %s cannot be written to. Set XDG_DATA_HOME to a "
                "folder of your own, then approve it: vlexport trust %s %s",
                path, self.folder, shlex.quote(str(path)), digest,
            )  # fmt: skip

    def require(self, digest: str, approve: str | None, path: Path) -> bool:
        """Refuse a digest that is neither known nor approved; True for an approval to be recorded."""
        if approve is not None and not digest.startswith(_read_approval(approve)):
            raise UntrustedError(
                f"{path}: its digest is {digest}, and {_read_approval(approve)} was approved. The bundle is "
                "another one, or it changed since. Ask whoever gave you the digest."
            )
        if self.knows(digest):
            return False
        if approve is not None:
            return True
        raise UntrustedError(
            f"{path}: neither built here nor approved. An engine is a program that runs with your rights; "
            f"expected a digest that you trust, found {digest}. If it is the one that its builder published, "
            f"approve it: `vlexport trust {shlex.quote(str(path))} {digest}`, or trust= in Python."
        )


class Verdicts(_Records):
    """Verdicts of later accuracy checks."""

    NAME = "verdicts"

    def read(self, digest: str) -> Verdict | None:
        try:
            raw = self._read(digest)
            return None if raw is None else decode(Verdict, parse(raw))
        except (OSError, InputError) as error:
            # Unreadable is not "passed": the bundle is checked again first.
            raise shortage(error) or RequestError(
                f"{self.folder / digest}: the verdict of the last check cannot be read ({error}). Remove the "
                "file, then check the bundle again: vlexport check BUNDLE --accuracy"
            ) from error

    def write(self, digest: str, verdict: Verdict) -> None:
        self._keep(digest, canonical(encode(verdict)), "the verdict")


class Newer(_Records):
    """Targets with a newer library than that of the build, on which a bundle of a portable format passed."""

    NAME = "newer"
    WHAT: ClassVar[str] = "the check on a newer library"

    def read(self, digest: str) -> frozenset[str]:
        try:
            return frozenset((self._read(digest) or b"").decode().splitlines())
        except (OSError, UnicodeDecodeError) as error:
            if problem := shortage(error):
                raise problem from error
            return frozenset()

    def write(self, digest: str, tag: str, *, passed: bool) -> None:
        before = self.read(digest)
        if (after := before | {tag} if passed else before - {tag}) != before:
            try:
                self._keep(digest, "\n".join(sorted(after)).encode(), self.WHAT)
            except UntrustedError:
                raise
            except VlexportError as error:
                # Nothing but the next check needs it.
                logger.warning("%s", error)


class Proved(Newer):
    """Machines and libraries on which a bundle passed its own proof."""

    NAME = "proved"
    WHAT = "the proof that passed"


class Programs(_Records):
    """Private files, a recipe or a backend, that made a trusted bundle: their paths and SHA-256."""

    NAME = "programs"

    def remember(self, digest: str, kind: str, path: Path) -> None:
        before = self._all(digest)
        after = {**before, kind: (str(path), hashlib.sha256(path.read_bytes()).hexdigest())}
        try:
            if after != before:
                self._keep(digest, canonical(encode(after)), f"the {kind} of a bundle")
        except VlexportError as error:
            # The file has to be given again.
            logger.warning("%s", error)

    def recall(self, digest: str, kind: str) -> Path | None:
        """Return the remembered file, if there is one; refuse a file that changed, before it runs."""
        place, before = self._all(digest).get(kind, ("", ""))
        path = Path(place)
        here = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no such file"
        if place and here != before:
            remedy = "pass its file as recipe (--recipe FILE)" if kind == "recipe" else "build with it again"
            raise MisfitError(
                f"{kind} {path}, which made this bundle, has changed or is gone: {here[:12]} found, "
                f"{before[:12]} expected. Put it back, or {remedy}."
            )
        return path if place else None

    def _all(self, digest: str) -> Mapping[str, tuple[str, str]]:
        raw, where = self._read(digest), str(self.folder / digest)
        return {} if raw is None else decode(dict[str, tuple[str, str]], parse(raw), where)


def _unwritable(path: Path, what: str, error: OSError) -> str:
    return (
        f"{path}: {what} cannot be recorded ({error.strerror}); expected a folder that you can write to. "
        "Make it writable, or set another data folder (XDG_DATA_HOME)."
    )


def check_private(folder: Path) -> None:
    """Refuse a folder of records that is no plain folder, or that others can write to."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedError(f"{folder}: a link or a file; expected a folder of your own. Remove it.")
    if os.name == "posix" and (status.st_mode & 0o022 or status.st_uid not in (os.geteuid(), 0)):
        raise UntrustedError(
            f"{folder}: others can write to these records (mode "
            f"{stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}); expected 700 and yourself. "
            f"Look through it, then: chmod 700 {shlex.quote(str(folder))}"
        )


def recall_program(kept: CacheFile) -> bytes | None:
    """Return a program from the user's cache if it is whole, in a folder where nobody else can write."""
    content = kept.recall()
    if content is None:
        return None
    try:
        check_private(kept.path.parent)
    except (VlexportError, OSError) as error:
        logger.warning("a program of the cache is made again: %s", error)
        return None
    return content


def _read_approval(text: str) -> str:
    digest = text.strip().lower().removeprefix("sha256:")
    if not _APPROVAL.fullmatch(digest):
        raise InputError(
            f"trust: {digest[:80]!r} given; expected the 64 hex digits of a SHA-256, or the first 12. "
            "`vlexport inspect BUNDLE` shows it."
        )
    return digest
