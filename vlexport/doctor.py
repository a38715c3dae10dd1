"""Checks of this machine: libraries, hardware and backends, with advice."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from vlexport.backends import Backend, backend_names, find_backend

State = Literal["fine", "note", "broken"]

# Below these, known flaws let a file or a config run code or leave its folder.
FLOORS = {
    "torch": "2.10",
    "transformers": "5.5",
    "onnx": "1.21",
    "pillow": "12.3",
    "filelock": "3.20.3",
}
# Dependencies that a machine may lack and still build and run, and the work that then fails.
OPTIONAL = {
    "av": "no video file is decoded; arrays of frames are read as before.",
    "platformdirs": "bundles need XDG_DATA_HOME, an absolute path to a folder of your own.",
}
LEAST_DISK_GIB = 5
LEAST_MEMORY_GIB = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check: `broken` stops the use of vlexport, `note` limits it."""

    name: str
    state: State
    found: str
    advice: str = ""

    def row(self) -> tuple[str, str, str, str]:
        return (self.name, self.state, self.found, self.advice)


def examine(into: Path = Path("engines")) -> list[Finding]:
    """Run all checks, in the order in which a user would fix them."""
    checks: tuple[Callable[[], Finding], ...] = (_python, _memory, lambda: _disk(into), _locks, _device)
    return [*(check() for check in checks), *_packages(), *_unsupported(), *_backends()]


def _python() -> Finding:
    fine = sys.version_info >= (3, 11)
    return Finding(
        name="python",
        state="fine" if fine else "broken",
        found=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        advice="" if fine else "Use Python 3.11 or newer.",
    )


def _memory() -> Finding:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    total = pages / 2**30
    fine = not pages or total >= LEAST_MEMORY_GIB
    return Finding(
        name="memory",
        state="fine" if fine else "note",
        found=f"{total:.0f} GiB, {os.cpu_count()} processors" if pages else "unknown",
        advice="" if fine else "Full-size towers need more; build with small profiles.",
    )


def _disk(into: Path) -> Finding:
    place = next(folder for folder in (into.absolute(), *into.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free / 2**30
    fine = free >= LEAST_DISK_GIB
    return Finding(
        name="disk",
        state="fine" if fine else "note",
        found=f"{free:.0f} GiB free where bundles go",
        advice="" if fine else "Free space, or build with --output-dir on another disk.",
    )


def _locks() -> Finding:
    """Acquire one lock twice: on some network file systems both succeed, and locks have no effect."""
    from filelock import FileLock, Timeout

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "lock")
        with FileLock(path):
            try:
                FileLock(path).acquire(timeout=0)
            except Timeout:
                return Finding(name="file locks", state="fine", found="held by one at a time")
    return Finding(
        name="file locks",
        state="note",
        found="given to two at once",
        advice="Builds stay correct; two at once may do the same work twice.",
    )


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        found = f"{name}, sm{major}{minor}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        return Finding(name="gpu", state="fine", found=found)
    return Finding(name="gpu", state="note", found="none that torch can use", advice="CPU backends work.")


def _packages() -> Iterator[Finding]:
    for name, floor in FLOORS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(
                name=name, state="broken", found="not installed", advice=f"pip install '{name}>={floor}'"
            )
            continue
        fine = Version(found) >= Version(floor)
        advice = "" if fine else f"Known flaws below {floor}: pip install '{name}>={floor}'"
        yield Finding(name=name, state="fine" if fine else "broken", found=found, advice=advice)
    for name, without in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            advice = f"Without it {without} pip install {name}"
            yield Finding(name=name, state="note", found="not installed", advice=advice)
    if importlib.util.find_spec("torchvision") is not None:
        yield Finding(name="torchvision", state="note", found=version("torchvision"), advice="Not used.")


def _unsupported() -> Iterator[Finding]:
    """Yield the installed libraries below the oldest version that is supported."""
    try:
        wanted = [Requirement(text) for text in requires("vlexport") or ()]
    except PackageNotFoundError:
        return
    for each in wanted:
        floor = next((known.version for known in each.specifier if known.operator == ">="), None)
        try:
            found = version(each.name)
        except PackageNotFoundError:
            continue
        if floor is not None and Version(found) < Version(floor):
            yield Finding(
                name=f"supported {each.name}",
                state="note",
                found=found,
                advice=f"Not supported below {floor}: pip install '{each.name}>={floor}'",
            )


def _backends() -> Iterator[Finding]:
    for backend in map(find_backend, backend_names()):
        try:
            state, found, advice = _backend(backend)
        except (ImportError, OSError, RuntimeError) as error:
            state, found = "note", f"does not start: {error}"
            advice = "Install its library again; the message names what it misses."
        yield Finding(name=f"backend {backend.name}", state=state, found=found, advice=advice)


def _backend(backend: Backend) -> tuple[State, str, str]:
    reason = backend.missing()
    if reason is not None:
        return "note", reason, f"pip install 'vlexport[{backend.extra}]'" if backend.extra else ""
    target = backend.target()
    waits = backend.cannot_run(target)
    if waits is not None:
        advice = "Build here with --targets; run the bundle on a machine with such a GPU."
        return "note", f"{target}: builds here, runs elsewhere ({waits})", advice
    return "fine", str(target), ""
