"""Memory and disk of real builds beside what `plan` says of them: each in a process of its own.

`python -m vlexport.bench.footprint --write docs/memory.md` measures towers of three sizes on every backend.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlexport.backends import backend_names, find_backend
from vlexport.bench import memory
from vlexport.bench.models import TowerSize, contents_of, default_recipe, random_items, write_tower
from vlexport.build import BuildRequest, build_checkpoint, request
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import VlexportError
from vlexport.forecast import Forecast, forecast
from vlexport.recipe import find_recipe
from vlexport.runtime.pipeline import load
from vlexport.specs import MediaBounds

# Not those that the costs were taken from: there depths were 2 and 4, widths 320, 640 and 1280.
# Integers would not pass their check on sharp deep towers, and what blocks add has no part in sizes.
SIZES = {
    "depth 3, width 480": TowerSize(
        depth=3, width=480, heads=6, inner=1280, out=768, full_blocks=(2,), branch_gain=0.41
    ),
    "depth 6, width 800": TowerSize(
        depth=6, width=800, heads=10, inner=2160, out=1536, full_blocks=(5,), branch_gain=0.29
    ),
    "depth 8, width 1280": TowerSize(
        depth=8, width=1280, heads=16, inner=3420, out=2048, full_blocks=(3, 7), branch_gain=0.25
    ),
}
SIDES = {"depth 3, width 480": 48, "depth 6, width 800": 56, "depth 8, width 1280": 64}
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One build; its profile is one square image of up to `side` patches a side, of 14 pixels each.

    precision  a dtype, or a quantisation
    """

    source: str
    backend: str
    precision: str
    side: int
    into: str

    def words(self) -> list[str]:
        return [self.source, self.backend, self.precision, str(self.side), self.into]

    def asked(self) -> BuildRequest:
        pixels = (self.side * 14) ** 2
        bounds = MediaBounds(min_pixels=1, max_pixels=pixels, max_images=1, max_frames=0)
        source = Checkpoint.open(self.source)
        able = {each.spelled: each for each in find_backend(self.backend).capabilities}[self.precision]
        quantise = able.quantisation.name if able.quantisation else None
        return request(
            source,
            backend=self.backend,
            dtype=able.dtype,
            quantise=quantise,
            profile=bounds,
            into=self.into,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one build, of its files, and of a process that opens it and encodes one image."""

    disk: int
    build: int
    run: int


def measured(case: Case) -> Footprint:
    """Build in one process, run in another; neither inherits memory from this one."""
    built = _child("build", case.words())
    ran = _child("run", [str(built["path"]), str(case.side)])
    files = [path for path in Path(str(built["path"])).rglob("*") if path.is_file()]
    return Footprint(
        disk=sum(path.stat().st_size for path in files), build=int(built["peak"]), run=int(ran["peak"])
    )


def foretold(found: Forecast) -> Footprint:
    """What `plan` says of the profile's usual call, which is that of `measured`."""
    assert found.needs is not None
    return Footprint(disk=found.needs.disk, build=found.needs.build_memory, run=found.needs.run_memory[1])


def worst_share(told: Footprint, real: Footprint) -> float:
    """The largest distance of a number from what was measured, as a share of that."""
    pairs = ((told.disk, real.disk), (told.build, real.build), (told.run, real.run))
    return max(abs(one - other) / other for one, other in pairs)


def pairs_here() -> Iterator[tuple[str, str]]:
    """Every backend and precision that this machine serves and whose costs are known."""
    for name in backend_names():
        backend = find_backend(name)
        if backend.missing() is None:
            yield from ((name, each.spelled) for each in backend.capabilities if each.costs is not None)


def _child(verb: str, words: Sequence[str]) -> dict[str, int | str]:
    command = [sys.executable, "-m", "vlexport.bench.footprint", verb, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VlexportError(f"{verb} {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, int | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _build(words: Sequence[str]) -> dict[str, int | str]:
    source, backend, precision, side, into = words
    case = Case(source=source, backend=backend, precision=precision, side=int(side), into=into)
    path = build_checkpoint(case.asked()).require_passed().path
    return {"path": str(path), "peak": memory.peak()}


def _run(words: Sequence[str]) -> dict[str, int | str]:
    path, side = words[0], int(words[1])
    manifest = Bundle.open(path).manifest
    recipe = find_recipe(manifest.recipe.name)
    items = random_items(recipe, recipe.parse_config(manifest.preprocessing), [(1, side, side)])
    with load(path) as pipeline:
        pipeline.encode_items(items)
    return {"peak": memory.peak()}


def table(folder: Path, said: Callable[[str], object]) -> str:
    """Measure everything; one row per tower, backend and precision, as `told / measured`."""
    lines = [
        "| tower | patches | backend | precision | disk MiB | build GiB | run GiB | farthest off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, size in SIZES.items():
        source = write_tower(folder / name, contents_of(default_recipe(), size))
        for backend, precision in pairs_here():
            case = Case(
                source=str(source),
                backend=backend,
                precision=precision,
                side=SIDES[name],
                into=str(folder / "out"),
            )
            told, real = foretold(forecast(case.asked())), measured(case)
            lines.append(_line(f"{name} | {case.side**2:,} | `{backend}` | `{precision}`", told, real))
            said(lines[-1])
    return "\n".join(lines)


def _line(head: str, told: Footprint, real: Footprint) -> str:
    cells = (
        f"{told.disk / 2**20:.0f} / {real.disk / 2**20:.0f}",
        f"{told.build / GIB:.2f} / {real.build / GIB:.2f}",
        f"{told.run / GIB:.2f} / {real.run / GIB:.2f}",
        f"{worst_share(told, real):.0%}",
    )
    return f"| {head} | {' | '.join(cells)} |"


PAGE = """# What builds and calls take, and what `vlexport plan` says before

Each row is a build of a tower with random weights in a process of its own, and a call of one square image
in another, on a machine with 2 cores; every cell is what `plan` said / what was measured (peak of resident
memory, files). Written by `python -m vlexport.bench.footprint --write docs/memory.md`. The costs that `plan`
computes with lie beside each backend (`Costs`); they were taken from towers of other depths and widths.

"""


def main() -> None:
    """Measure and write the page, or be one of the measured processes."""
    if sys.argv[1:2] in (["build"], ["run"]):
        work = {"build": _build, "run": _run}[sys.argv[1]]
        sys.stdout.write(json.dumps(work(sys.argv[2:])) + "\n")
        return
    parser = argparse.ArgumentParser(prog="python -m vlexport.bench.footprint", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the page")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = table(Path(folder), lambda line: sys.stderr.write(line + "\n"))
    given.write.write_text(PAGE + found + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
