"""Running commands in this process, what they printed, and bundles that they may spoil."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlexport.bundle import Bundle, Trust
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


def vlexport(*words: object) -> Ran:
    """`vlexport WORDS`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
    return Ran(code=code, out=out.getvalue(), err=err.getvalue())


def own_copy(built: Path, copy: Path) -> Path:
    """A copy of a bundle with a digest of its own, trusted, to be changed."""
    shutil.copytree(built, copy)
    seconds = int(hashlib.sha256(str(copy).encode()).hexdigest(), 16) % 10**9
    created = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    own = replace(Bundle.open(copy).manifest, created=created)
    (copy / "manifest.json").write_bytes(own.encoded())
    Trust.of().record(own.digest(), "built")
    return copy
