"""Verdicts of later accuracy checks, in the user's own data folder, one file for each manifest's digest.

The verdict of the build stands in the manifest, under its digest. A later one stands here, where nobody else
can write: a stranger's file beside a bundle grants nothing, and a digest does not move.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from vlexport.bundle.manifest import Verdict, check_digest
from vlexport.bundle.os_errors import is_full
from vlexport.bundle.trust import check_private, user_data_folder
from vlexport.codec import MAX_BYTES, canonical, decode, encode, parse
from vlexport.errors import InputError, RequestError, ResourceError


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """The folder of verdicts; every entry is a file named by the digest of a manifest."""

    folder: Path

    @classmethod
    def of(cls, user_data: Path | None = None) -> Verdicts:
        """The user's own, or the one under `user_data`."""
        root = user_data or user_data_folder()
        return cls(folder=root / "verdicts")

    def read(self, digest: str) -> Verdict | None:
        """Return the last verdict on a bundle, or None where it was never checked again."""
        path = self.folder / check_digest(digest, "digest")
        try:
            check_private(self.folder, "verdicts")
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(descriptor, "rb") as file:
                return decode(Verdict, parse(file.read(MAX_BYTES + 1)))
        except FileNotFoundError:
            return None
        except (OSError, InputError) as error:
            # Unreadable is not "passed": the bundle is checked again first.
            raise RequestError(
                f"{path}: the verdict of the last check cannot be read ({error}). Remove the file, then "
                "check the bundle again: vlexport parity BUNDLE"
            ) from error

    def write(self, digest: str, verdict: Verdict) -> None:
        """Keep a verdict in place of an earlier one, whole or not at all."""
        path = self.folder / check_digest(digest, "digest")
        beside = self.folder / f".{digest}.{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self.folder, "verdicts")
            try:
                beside.write_bytes(canonical(encode(verdict)))
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            kind = ResourceError if is_full(error) else RequestError
            raise kind(
                f"{path}: the verdict cannot be kept ({error.strerror}); expected a folder that you can "
                "write to. Make it writable, or set another data folder (XDG_DATA_HOME)."
            ) from error

    def forget(self, digest: str) -> None:
        """Drop the verdict on a bundle: that of its build counts again."""
        (self.folder / check_digest(digest, "digest")).unlink(missing_ok=True)
