"""Who vouches for a bundle: digests of manifests that were built here or approved, one file each.

An engine is a program: a bundle is loaded only when the user's own data folder holds its manifest's digest.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlexport.bundle.manifest import check_digest
from vlexport.bundle.os_errors import is_full
from vlexport.errors import InputError, RequestError, ResourceError, UntrustedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """The folder of digests; every entry is a file named by a digest."""

    folder: Path

    @classmethod
    def of(cls, user_data: Path | None = None) -> Trust:
        """The user's own, or the one under `user_data`."""
        return cls(folder=(user_data or user_data_folder()) / "trusted")

    def knows(self, digest: str) -> bool:
        """Whether the digest was recorded; a folder that others can write to is refused, not believed."""
        check_digest(digest, "digest")
        try:
            check_private(self.folder, "trusted bundles")
            return stat.S_ISREG(os.lstat(self.folder / digest).st_mode)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RequestError(
                f"{self.folder}: the record of trusted bundles cannot be read ({error.strerror}); expected a "
                "folder of your own. Give yourself access to it."
            ) from error

    def record(self, digest: str, how: Literal["built", "approved"]) -> None:
        """Remember a digest; recording twice is fine."""
        check_digest(digest, "digest")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self.folder, "trusted bundles")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(self.folder / digest, flags, 0o600), "w", encoding="ascii") as file:
                file.write(f"{how}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            kind = ResourceError if is_full(error) else RequestError
            raise kind(
                f"{self.folder}: the trust in {digest} cannot be recorded ({error.strerror}); expected a "
                "folder that you can write to. Make it writable or set another data folder (XDG_DATA_HOME)."
            ) from error

    def forget(self, digest: str) -> None:
        """Remove a digest; one that is not there is fine."""
        (self.folder / check_digest(digest, "digest")).unlink(missing_ok=True)

    def require(self, digest: str, approve: str | None, path: Path) -> None:
        """Refuse an unknown digest with an `UntrustedError`; `approve` records the user's approval first."""
        if approve is not None and _read_approval(approve) != digest:
            raise UntrustedError(
                f"{path}: its digest is {digest}, and {_read_approval(approve)} was approved. The bundle is "
                "another one, or it changed since. Ask whoever gave you the digest."
            )
        if self.knows(digest):
            return
        if approve is not None:
            self.record(digest, "approved")
            return
        raise UntrustedError(
            f"{path}: neither built here nor approved. An engine is a program that runs with your rights; "
            f"expected a digest that you trust, found {digest}. If it is the one that its builder told you, "
            f"repeat the command with: --trust {digest}"
        )


def check_private(folder: Path, what: str) -> None:
    """Refuse a folder of records that is no plain folder, or that others can write to."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise UntrustedError(f"{folder}: a link or a file; expected a folder of your own. Remove it.")
    if os.name == "posix" and (found.st_mode & 0o022 or found.st_uid not in (os.geteuid(), 0)):
        raise UntrustedError(
            f"{folder}: others can write to the record of {what} (mode "
            f"{stat.S_IMODE(found.st_mode):o}, owner {found.st_uid}); expected 700 and yourself. "
            f"Look through it, then: chmod 700 {folder}"
        )


def _read_approval(text: str) -> str:
    digest = text.strip().lower().removeprefix("sha256:")
    try:
        return check_digest(digest, "--trust")
    except InputError as error:
        raise InputError(f"{error} `vlexport inspect BUNDLE` shows it.") from error


def user_data_folder() -> Path:
    """Return the user's data folder: in `XDG_DATA_HOME` where that is set, else where the platform has it."""
    named = os.environ.get("XDG_DATA_HOME", "")
    if Path(named).is_absolute():
        return Path(named) / "vlexport"
    try:
        import platformdirs
    except ModuleNotFoundError as error:
        raise RequestError(
            "the folder for approvals of bundles is not known: the package platformdirs is not installed. "
            "Install it, or set XDG_DATA_HOME to a folder of your own."
        ) from error
    return platformdirs.user_data_path("vlexport", appauthor=False)
