"""This process and those it starts: their imports, their folders, and memory back to the system.

A started one imports from where this one does, and nothing from the folder in which it runs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# Those that libraries start in such a process are like it.
SAFE = {"PYTHONSAFEPATH": "1"}
CACHES = "TORCHINDUCTOR_CACHE_DIR"
# Searching all objects for cycles takes a quarter of a second.
WORTH_A_SEARCH = 2**26


def command(code: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs this code; `-c` by itself imports from the current folder."""
    flag = "-I" if sys.flags.isolated else "-P"
    return [sys.executable, flag, "-c", f"import sys; sys.path[:] = {_places()!a}; {code}", *arguments]


def environment() -> dict[str, str]:
    """Return the environment of such a process."""
    return {**os.environ, **SAFE}


@contextmanager
def compile_caches(folder: Path | None = None) -> Iterator[None]:
    """Keep the caches of torch's compiler in a private folder, a new one if none is given, unless one is set.

    torch makes its folder whenever it compiles or merely exports, in the temporary folder and for good. Its
    processes import nothing from the current folder.
    """
    with ExitStack() as stack:
        settings = dict(SAFE)
        if not os.environ.get(CACHES):
            place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings[CACHES] = str(place / "torchinductor")
        unset = {name: value for name, value in settings.items() if not os.environ.get(name)}
        os.environ.update(unset)
        try:
            yield
        finally:
            for name in unset:
                del os.environ[name]


def _places() -> list[str]:
    """Return where this process imports from, but for places relative to the current folder."""
    home = str(Path(__file__).parents[1])
    found = [place for place in sys.path if Path(place).is_absolute()]
    return found if home in found else [*found, home]


def give_back(size: int = WORTH_A_SEARCH) -> None:
    """Collect what cycles hold, such as exported programs, and return free memory to the system.

    `size`: of what was let go of, in bytes.
    """
    if size < WORTH_A_SEARCH:
        return
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # only the GNU library has it
            trim(0)
