"""Resident memory of processes, from /proc; elsewhere everything reads as zero, which means unknown."""

from __future__ import annotations

import sys
from pathlib import Path


def _field(path: str, field: str) -> int:
    try:
        lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return 1024 * int(next((line.split()[1] for line in lines if line.startswith(field)), "0"))


def own(process: int | str = "self") -> int:
    """Return the bytes of a process that are no pages of files, which come and go with need."""
    return _field(f"/proc/{process}/status", "RssAnon:")


def own_peak() -> int:
    """Return the most that `own` has been since `forget_peak`, pages of files taken as they are now."""
    peak, resident = (_field("/proc/self/status", field) for field in ("VmHWM:", "VmRSS:"))
    return peak - resident + own()


def forget_peak() -> None:
    if sys.platform == "linux":
        # 5 resets the peak: proc(5), /proc/pid/clear_refs.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def available() -> int:
    """Return the bytes that new processes may take without swapping."""
    return _field("/proc/meminfo", "MemAvailable:")


def steal() -> float:
    """Return the seconds that processors have waited for other machines on the same hardware."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / 100 if len(fields) > 8 else 0.0
