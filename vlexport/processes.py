"""Python processes that import from where this one does, and nothing from the folder in which it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Those that libraries start in such a process are like it.
SAFE = {"PYTHONSAFEPATH": "1"}


def command(code: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs this code; `-c` by itself imports from the current folder."""
    flag = "-I" if sys.flags.isolated else "-P"
    return [sys.executable, flag, "-c", f"import sys; sys.path[:] = {_places()!a}; {code}", *arguments]


def environment() -> dict[str, str]:
    """Return the environment of such a process."""
    return {**os.environ, **SAFE}


def _places() -> list[str]:
    """Return where this process imports from, but for places relative to the current folder."""
    home = str(Path(__file__).parents[1])
    found = [place for place in sys.path if Path(place).is_absolute()]
    return found if home in found else [*found, home]
