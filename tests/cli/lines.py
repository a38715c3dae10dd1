"""Running commands in this process, what they printed, and bundles that they may spoil."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
from dataclasses import dataclass, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from vlexport.bundle import Manifest, Trust
from vlexport.cli import run

SCRIPT = Path(sys.executable).with_name("vlexport")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def ends(self, code: int) -> Ran:
        """Hold the command to an exit code; returns it for what it printed."""
        __tracebackhide__ = True
        assert self.code == code, self.err
        return self


def vlexport(*words: object, stdout: TextIO | None = None) -> Ran:
    """`vlexport WORDS`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout or out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
    return Ran(code=code, out=out.getvalue(), err=err.getvalue())


def bundle_of(*words: object) -> Path:
    """`vlexport build WORDS`; the bundle of a build that passed."""
    return Path(vlexport("build", *words).ends(0).lines[-1])


class Terminal(io.StringIO):
    """A stream that is taken for a terminal."""

    def isatty(self) -> bool:
        return True


def own_copy(built: Path, copy: Path) -> Path:
    """A copy of a bundle with a digest of its own, trusted, to be changed."""
    shutil.copytree(built, copy)
    seconds = int(hashlib.sha256(str(copy).encode()).hexdigest(), 16) % 10**9
    change_manifest(copy, created=datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    return copy


def change_manifest(bundle: Path, *, trusted: bool = True, **changes: object) -> Manifest:
    """Give a bundle another manifest, whoever vouches for it; a mapping changes a part of a field."""
    file = bundle / "manifest.json"
    before = Manifest.parse(file.read_bytes())
    values = {}
    for name, value in changes.items():
        field = getattr(before, name)
        has_parts = is_dataclass(field)
        values[name] = replace(field, **value) if has_parts and isinstance(value, dict) else value
    changed = replace(before, **values)  # type: ignore[arg-type]
    file.write_bytes(changed.encoded())
    if trusted:
        Trust.of().record(changed.digest(), "built")
    return changed


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
