"""Resident memory of processes, from /proc; elsewhere everything reads as zero, which means unknown."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path


def resident(process: int | str = "self") -> int:
    """Bytes that a process holds now."""
    return _status(process, "VmRSS:")


def peak() -> int:
    """The most bytes that this process has held since `forget_peak`."""
    return _status("self", "VmHWM:")


def own() -> int:
    """Bytes of this process that are no pages of files, which come and go with the machine's needs."""
    return _status("self", "RssAnon:")


def own_peak() -> int:
    """The most that `own` has been since `forget_peak`, if pages of files were as many then as now."""
    return peak() - _status("self", "RssFile:") - _status("self", "RssShmem:")


def forget_peak() -> None:
    """Start the peaks anew, after what is free has gone back to the system."""
    if sys.platform != "linux":
        return
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only the GNU library has it
        trim(0)
    # 5 resets the peak: proc(5), /proc/pid/clear_refs.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def available() -> int:
    """Bytes that new processes may take without swapping."""
    return _field(Path("/proc/meminfo"), "MemAvailable:")


def _status(process: int | str, field: str) -> int:
    return _field(Path(f"/proc/{process}/status"), field)


def _field(path: Path, field: str) -> int:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    found = next((line.split()[1] for line in lines if line.startswith(field)), "0")
    return int(found) * 1024


def steal() -> float:
    """Seconds that this machine's processors have waited for others on the same hardware since it started."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / 100 if len(fields) > 8 else 0.0
