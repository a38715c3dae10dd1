"""Freed memory back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

# Searching all objects for cycles takes a quarter of a second.
WORTH_A_SEARCH = 2**26


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
