"""Checks of this machine: libraries, hardware and backends, with advice."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from vlexport._build.aoti import compiler
from vlexport.backends import Backend, backend_names, find_backend
from vlexport.codec import encode
from vlexport.errors import UNEXPECTED, VlexportError
from vlexport.system import free_bytes

State = Literal["fine", "note", "broken"]

# Below these, known flaws let a file or a config run code or leave its folder.
FLOORS = {
    "torch": "2.10",
    "transformers": "5.5",
    "jinja2": "3.1.6",
    "onnx": "1.21",
    "pillow": "12.3",
    "filelock": "3.20.3",
}
# Dependencies that a machine may lack and still build and run, and the work that then fails.
OPTIONAL = {
    "av": "no video file is decoded; arrays of frames are read as before.",
    "platformdirs": "bundles need XDG_DATA_HOME, an absolute path to a folder of your own.",
}
# The pins of the tests, for what a user installs; `make lock` writes it.
TESTED = Path(__file__).with_name("tested.txt")
LEAST_DISK_GIB = 5
LEAST_MEMORY_GIB = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check: `broken` stops the use of vlexport, `note` limits it."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Findings about this machine, and the backends that are known, usable or not."""

    findings: list[Finding]
    backends: list[Backend]

    @property
    def broken(self) -> list[str]:
        return [finding.name for finding in self.findings if finding.state == "broken"]

    def to_json(self) -> dict[str, object]:
        return {"findings": encode(self.findings), "backends": list(map(_backend_json, self.backends))}


def _backend_json(backend: Backend) -> dict[str, object]:
    return {
        "name": backend.name,
        "dtypes": [
            capability.dtype for capability in backend.capabilities if capability.quantisation is None
        ],
        "extra": backend.extra,
        "quantise": [
            capability.quantisation.name for capability in backend.capabilities if capability.quantisation
        ],
        "summary": backend.summary,
        "missing": backend.missing(),
    }


def doctor(*, deep: bool = False) -> Diagnosis:
    """Check libraries, hardware and backends.

    deep  compare pixels, positions and pruning with stored values too (seconds)

        vlexport.doctor().broken
    """
    return Diagnosis(findings=examine(deep=deep), backends=[find_backend(name) for name in backend_names()])


def _judged(name: str, result: str, advice: str, *, fine: bool, otherwise: State = "note") -> Finding:
    if fine:
        return Finding(name=name, state="fine", found=result)
    return Finding(name=name, state=otherwise, found=result, advice=advice)


def examine(*, deep: bool = False) -> list[Finding]:
    """Run all checks in a user's order of fixing; `deep` compares pixels, positions and pruning too."""
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "python": lambda: [_python()],
        "memory": lambda: [_memory()],
        "disk": lambda: [_disk()],
        "file locks": lambda: [_locks()],
        "gpu": lambda: [_device()],
        "c++ compiler": lambda: [_compiler()],
        **{name: partial(_package, name, floor) for name, floor in FLOORS.items()},
        **{name: partial(_optional, name, without) for name, without in OPTIONAL.items()},
        "torchvision": _unused,
        **{f"supported {requirement.name}": partial(_supported, requirement) for requirement in _wanted()},
        **{f"backend {name}": partial(_backend, find_backend(name)) for name in backend_names()},
    }
    findings = [finding for name, check in checks.items() for finding in _caught(name, check)]
    return [*findings, *(_deep() if deep else ())]


def _caught(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run a check; its own failure is a finding, and the others still run."""
    try:
        return list(check())
    except (ImportError, OSError, VlexportError, *UNEXPECTED) as error:
        result = " ".join(f"{type(error).__name__}: {error}".split())
        advice = "This check failed by itself: look at the library or folder that the message names."
        return [Finding(name=name, state="note", found=result, advice=advice)]


def _python() -> Finding:
    result = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    fine = sys.version_info >= (3, 11)
    return _judged("python", result, "Use Python 3.11 or newer.", fine=fine, otherwise="broken")


def _memory() -> Finding:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    total = pages / 2**30
    result = f"{total:.0f} GiB, {os.cpu_count()} processors" if pages else "unknown"
    advice = "Full-size towers need more; build with small profiles."
    return _judged("memory", result, advice, fine=not pages or total >= LEAST_MEMORY_GIB)


def _disk() -> Finding:
    free = free_bytes(Path("engines")) / 2**30
    advice = "Free space, or build with --output-dir on another disk."
    return _judged("disk", f"{free:.0f} GiB free where bundles go", advice, fine=free >= LEAST_DISK_GIB)


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
    advice = "Builds stay correct; two at once may do the same work twice."
    return Finding(name="file locks", state="note", found="given to two at once", advice=advice)


def _device() -> Finding:
    try:
        import torch
    except ModuleNotFoundError:
        return Finding(name="gpu", state="note", found="unknown without torch", advice="Install torch first.")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        result = f"{name}, sm{major}{minor}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        return Finding(name="gpu", state="fine", found=result)
    return Finding(name="gpu", state="note", found="none that torch can use", advice="CPU backends work.")


def _compiler() -> Finding:
    path = compiler()
    advice = (
        "Pruning and positions of bundles built here run eagerly; install g++ or set CXX to compile them."
    )
    return _judged("c++ compiler", path or "none found", advice, fine=path is not None)


def _package(name: str, floor: str) -> Iterator[Finding]:
    try:
        installed = version(name)
    except PackageNotFoundError:
        install = f"pip install '{name}>={floor}'"
        yield Finding(name=name, state="broken", found="not installed", advice=install)
        return
    advice = f"Known flaws below {floor}: pip install '{name}>={floor}'"
    yield _judged(name, installed, advice, fine=Version(installed) >= Version(floor), otherwise="broken")


def _optional(name: str, without: str) -> Iterator[Finding]:
    if importlib.util.find_spec(name) is None:
        advice = f"Without it {without} pip install {name}"
        yield Finding(name=name, state="note", found="not installed", advice=advice)


def _unused() -> Iterator[Finding]:
    if importlib.util.find_spec("torchvision") is not None:
        yield Finding(name="torchvision", state="note", found=version("torchvision"), advice="Not used.")


def _wanted() -> list[Requirement]:
    try:
        return [Requirement(text) for text in requires("vlexport") or ()]
    except PackageNotFoundError:
        return []


def _supported(requirement: Requirement) -> Iterator[Finding]:
    name, row = requirement.name, f"supported {requirement.name}"
    floor = next((bound.version for bound in requirement.specifier if bound.operator == ">="), None)
    tested = dict(line.split("==") for line in TESTED.read_text(encoding="utf-8").splitlines()).get(name)
    try:
        installed = version(name)
    except PackageNotFoundError:
        return
    if floor is not None and Version(installed) < Version(floor):
        advice = f"Not supported below {floor}: pip install '{name}>={floor}'"
        yield Finding(name=row, state="note", found=installed, advice=advice)
    # The part after + names how it was built.
    elif tested is not None and Version(Version(installed).public) > Version(tested):
        advice = (
            f"Newer than {tested}, the tested version. If something fails: pip install '{name}=={tested}'"
        )
        yield Finding(name=row, state="note", found=installed, advice=advice)


def _backend(backend: Backend) -> Iterator[Finding]:
    name, wheels = f"backend {backend.name}", backend.installed()
    if len(wheels) > 1:
        for wheel in wheels:
            yield Finding(name=wheel, state="note", found=version(wheel), advice=backend.mend())
    reason = backend.missing()
    if reason is not None:
        install = f"pip install 'vlexport[{backend.extra}]'" if backend.extra else ""
        advice = backend.mend() if wheels else install
        yield Finding(name=name, state="note", found=reason, advice=advice)
        return
    try:
        target = backend.target()
    except (ImportError, OSError, *UNEXPECTED) as error:
        advice = backend.mend() if wheels else "Install its library again; the message names what it misses."
        yield Finding(name=name, state="note", found=f"does not start: {error}", advice=advice)
        return
    waits = backend.cannot_run(target)
    result = f"{target}: builds here, runs elsewhere ({waits})" if waits is not None else str(target)
    advice = "Build here with --targets; run the bundle on a machine with such a GPU."
    yield _judged(name, result, advice, fine=waits is None)


# One grey level is at most 0.016; other processors round the resize of bytes to the next one.
NEAR = 0.035
# An image of 2 x 3 tokens and a video of 2 x 2 x 2 tokens, two seconds apart, in a prompt of 20 columns.
POSITIONS = (
    (0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 10, 10, 10, 10, 11, 12, 13),
    (0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 7, 7, 6, 6, 7, 7, 11, 12, 13),
    (0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7, 11, 12, 13),
)
KEPT = (0, 1, 2, 3, 5, 7)


def _deep() -> Iterator[Finding]:
    """Compare pixels, positions and pruning with stored values: a library may change them silently."""
    from vlexport.recipe import list_recipes

    names = (card.name for card in list_recipes())
    demos = {name: importlib.util.find_spec(f"vlexport.recipes.demo.{name}") for name in names}
    checks: dict[str, Callable[[], str]] = {
        **{f"pixels, {name}": partial(_pixels, name) for name, demo in demos.items() if demo},
        "positions": _positions,
        "pruning": _pruning,
    }
    for name, check in checks.items():
        try:
            wrong = check()
        except (VlexportError, ImportError, OSError, *UNEXPECTED) as error:
            wrong = f"{type(error).__name__}: {error}"
        advice = "A library gives other values than those measured: install the pinned versions."
        yield _judged(name, wrong or "as measured", advice, fine=not wrong, otherwise="broken")


def _pixels(recipe: str) -> str:
    import torch

    from vlexport.checkpoint import Checkpoint
    from vlexport.recipe import find_recipe
    from vlexport.recipes.demo.writing import write_checkpoint
    from vlexport.specs import Pixels

    demo, family = importlib.import_module(f"vlexport.recipes.demo.{recipe}"), find_recipe(recipe)
    with tempfile.TemporaryDirectory() as folder:
        config = family.read_config(
            Checkpoint.open(write_checkpoint(Path(folder) / "tiny", demo.contents(), seed=0))
        )
    # Levels far apart from pixel to pixel: every filter gives other values.
    places = torch.arange(3 * 210 * 290).reshape(1, 210, 290, 3)
    frames = (places * 7919 // 64 % 256).to(torch.uint8)
    item = family.preprocess(config, Pixels(kind="image", frames=frames))
    flat = item.patches.flatten()
    values = tuple(float(flat[len(flat) * part // 7]) for part in range(7))
    grid, expected = demo.PIXELS
    if item.grid != grid:
        return f"grid {item.grid}, not {grid}"
    furthest = max(abs(one - other) for one, other in zip(values, expected, strict=True))
    return f"{furthest:.3f} away at most, more than {NEAR}" if furthest > NEAR else ""


def _positions() -> str:
    from vlexport.positions.mrope import initial_positions
    from vlexport.positions.rules import PlacedMedia, PositionRule

    rule = PositionRule(kind="time_scaled", merge=2, tokens_per_second=2.0)
    media = [
        PlacedMedia(modality="image", offset=2, length=6, grid=(1, 4, 6), seconds_per_grid=None),
        PlacedMedia(modality="video", offset=9, length=8, grid=(2, 4, 4), seconds_per_grid=2.0),
    ]
    table = initial_positions([0] * 20, media, rule).table_RN.tolist()
    wrong = [
        f"row {row}: {positions}" for row, positions in enumerate(table) if tuple(positions) != POSITIONS[row]
    ]
    return wrong[0] if wrong else ""


def _pruning() -> str:
    import torch

    from vlexport.pruning.evs import prune

    # Two frames of four tokens; the second and the last one change most.
    rows = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 1], [1, 0], [0, 1], [0, 1], [-1, -1]])
    kept = tuple(prune(rows, (2, 4, 4), 2, 0.25).kept.tolist())
    return "" if kept == KEPT else f"tokens {kept} are kept, not {KEPT}"
