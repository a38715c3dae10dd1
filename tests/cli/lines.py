"""Running commands in this process, and what they printed."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from vlexport.cli import run


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


def vlexport(*words: object) -> Ran:
    """`vlexport WORDS`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
    return Ran(code=code, out=out.getvalue(), err=err.getvalue())
