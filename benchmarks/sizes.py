"""Memory and disk of real builds: every command of `vlexport` in a process of its own.

`python -m benchmarks.sizes plan FOLDER` compares towers of three sizes on every backend with what `vlexport
plan` computes (docs/results/memory.md). `python -m benchmarks.sizes released FOLDER` builds and runs
towers of released sizes (docs/results/full_size.md); the folder keeps what was measured, so it can be stopped
and resumed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vlexport.recipes.demo.qwen2_5_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.options import COMMON, parser_of
from benchmarks.tables import markdown, marks, publish
from benchmarks.towers import THREE_BILLION, TowerSize, default_recipe, write_tower
from vlexport.backends import backend_names, find_backend, runs_here
from vlexport.errors import VlexportError

# Costs of calls were taken from others, of depths 2 and 4 and widths 320, 640 and 1280; those of builds from
# these.
# Integers would not pass their check on sharp deep towers, and what blocks add has no part in sizes.
SIZES = {
    f"depth {depth}, width {width}": (
        TowerSize(
            depth=depth, width=width, heads=width // 80, inner=inner, out=out,
            full_blocks=full, branch_gain=gain,
        ),
        side,
    )
    for depth, width, inner, out, full, gain, side in (
        (3, 480, 1280, 768, (2,), 0.41, 48),
        (6, 800, 2160, 1536, (5,), 0.29, 56),
        (8, 1280, 3420, 2048, (3, 7), 0.25, 64),
    )
}  # fmt: skip
# Width of tokens of the two released sizes; their towers are alike but for that.
WIDTHS = {"3B": 2048, "7B": 3584}
SHARDS, PATCH, RELEASED_SIDE = 4, 14, 32
GIB, MIB = 2**30, 2**20
# The peak of a process begins with that of whoever starts it, so a process that holds nothing does.
STARTER = """
import os, sys
process = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(process, 0)
os.write(int(sys.argv[1]), f"{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss}".encode())
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One tower with one backend in one precision: a dtype, or a quantisation."""

    tower: str
    backend: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.tower} {self.backend} {self.precision}"

    def words(self) -> list[str]:
        able = {each.spelled: each for each in find_backend(self.backend).capabilities}[self.precision]
        quantise = ["--quantize", able.quantisation.name] if able.quantisation else []
        return ["--backend", self.backend, "--dtype", able.dtype, *quantise]


def cells(towers: Sequence[str], only: str = "") -> list[Cell]:
    """Return every precision of every backend that runs here and whose costs are known."""
    found = [
        Cell(tower=tower, backend=backend.name, precision=able.spelled)
        for tower, backend in product(towers, map(find_backend, backend_names()))
        for able in backend.capabilities
        if able.costs is not None and runs_here(backend, able.precision)
    ]
    return [cell for cell in found if cell.name.startswith(only)]


def command(*words: object) -> dict[str, Any]:
    """Run `vlexport WORDS --json` in a process of its own, whose peak nothing else can raise."""
    with tempfile.TemporaryFile("w+") as ends:
        started = time.monotonic()
        line = [str(Path(sys.executable).with_name("vlexport")), *map(str, words), "--json"]
        starter = [sys.executable, "-I", "-S", "-c", STARTER, str(ends.fileno())]
        ran = subprocess.run(
            [*starter, *line], capture_output=True, text=True, check=True, pass_fds=[ends.fileno()]
        )
        seconds = round(time.monotonic() - started, 1)
        ends.seek(0)
        code, peak = map(int, ends.read().split())
    last = "" if code == 0 else " ".join(ran.stderr.strip().splitlines()[-1:])[:300]
    document = json.loads(ran.stdout) if ran.stdout.startswith("{") else {}
    return {"code": code, "seconds": seconds, "peak": peak * 1024, "last": last, "document": document}


def measure(
    folder: Path, source: Path, cell: Cell, side: int, profile: Sequence[object] = ()
) -> dict[str, Any]:
    """Build, and encode one square image of `side` patches a side; the bundle is removed afterwards."""
    built = command("build", source, *cell.words(), *profile, "--output-dir", folder / "engines")
    document = built.pop("document")
    found: dict[str, Any] = {"build": built}
    if built["code"] not in (0, 3):
        return found
    bundle, rows = Path(document["bundle"]), document["parity"]["table"]["rows"]
    found |= {"status": document["parity"]["status"], "worst": worst(rows), "failed": failed(rows)}
    found["disk"] = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    image = folder / "image.png"
    pixels = np.random.default_rng(0).integers(0, 256, (side * PATCH, side * PATCH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(image)
    out = folder / "out.safetensors"
    found["encode"] = command("encode", bundle, "--image", image, "--output", out, "--allow-failed")
    shutil.rmtree(bundle)
    return found


def worst(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return by level the largest error that was compared with a limit."""
    found: dict[str, float] = {}
    for row in rows:
        error = row["metrics"].get("ratio", row["metrics"].get("relative_l2"))
        if error is not None and row["limits"]:
            found[row["level"]] = max(found.get(row["level"], 0.0), float(error))
    return found


def failed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return levels and checks that did not pass."""
    wrong = (row for row in rows if row["verdict"] in ("failed", "blocked"))
    return sorted({f"{row['level']} {row['check']}" for row in wrong})


def planned(folder: Path, source: Path, cell: Cell, side: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return disk, build and run as `plan` computes them, and as measured."""
    profile = ("--min-pixels", 1, "--max-pixels", (side * PATCH) ** 2, "--max-images", 1, "--max-frames", 0)
    plan = command("plan", source, *cell.words(), *profile, "--output-dir", folder / "engines")
    found = measure(folder, source, cell, side, profile)
    if plan["code"] or found["build"]["code"] or found["encode"]["code"]:
        raise VlexportError(f"{cell.name}: a command failed: {plan['last']} {found}")
    needs = plan["document"]
    memory = {"build": needs["build_memory_bytes"], "run": needs["run_memory_bytes"][1]}
    computed = {"disk": needs["disk_bytes"], **memory}
    return computed, {"disk": found["disk"], "build": found["build"]["peak"], "run": found["encode"]["peak"]}


def worst_share(computed: Mapping[str, int], real: Mapping[str, int]) -> float:
    """Return the largest distance of a number from what was measured, as a share of that."""
    return max(abs(computed[name] - real[name]) / real[name] for name in real)


def plan_table(folder: Path, only: str) -> str:
    """Measure everything; one row per tower, backend and precision, as `computed / measured`."""
    head = ("tower", "patches", "backend", "precision", "disk MiB", "build GiB", "run GiB", "farthest off")
    rows = []
    for cell in cells(list(SIZES), only):
        size, side = SIZES[cell.tower]
        source = write_tower(folder / cell.tower, default_recipe(), size)
        computed, real = planned(folder, source, cell, side)
        row = (
            *(cell.tower, f"{side**2:,}", f"`{cell.backend}`", f"`{cell.precision}`"),
            f"{computed['disk'] / MIB:.0f} / {real['disk'] / MIB:.0f}",
            *(f"{computed[name] / GIB:.2f} / {real[name] / GIB:.2f}" for name in ("build", "run")),
            f"{worst_share(computed, real):.0%}",
        )
        rows.append(row)
        sys.stderr.write(f"{' | '.join(row)}\n")
    return "\n".join(markdown(head, rows))


def released(folder: Path, cell: Cell, depth: int = 32) -> dict[str, Any]:
    """Measure a tower of released size without a decoder; where precision is lost, blocks add less."""
    exact = cell.precision == "float32"
    source = folder / f"{cell.tower}-{depth}-{'sharp' if exact else 'scaled'}"
    if not source.is_dir():
        gain = 1.0 if exact else (2 * depth) ** -0.5
        tower = replace(THREE_BILLION, depth=depth, out=WIDTHS[cell.tower], branch_gain=gain)
        write_checkpoint(source, contents(replace(tower, with_decoder=False)), shards=SHARDS)
    return {"depth": depth, **measure(folder, source, cell, RELEASED_SIDE)}


def released_table(folder: Path, only: str, depth: int) -> str:
    """Measure what the folder does not hold yet."""
    head = (
        "tower", "backend", "precision", "build s", "GiB", "files MiB", "accuracy", "L1", "L2 ratio", "L3",
        "encode s", "GiB",
    )  # fmt: skip
    kept = folder / f"cells-{depth}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for cell in cells(list(WIDTHS), only):
        if cell.name not in found:
            found[cell.name] = released(folder, cell, depth)
            kept.write_text(json.dumps(found, indent=1))
            sys.stderr.write(f"{' | '.join(released_row(cell.name, found[cell.name]))}\n")
    return "\n".join(markdown(head, (released_row(name, each) for name, each in found.items())))


def released_row(name: str, found: Mapping[str, Any]) -> Sequence[str]:
    tower, backend, precision = name.split()
    build, encode, errors = found["build"], found.get("encode"), found.get("worst", {})
    status = found.get("status", f"exit code {build['code']}")
    return (
        *(tower, f"`{backend}`", f"`{precision}`", f"{build['seconds']:.0f}", f"{build['peak'] / GIB:.1f}"),
        f"{found['disk'] / MIB:,.0f}" if "disk" in found else "",
        f"{status}: {', '.join(found['failed'])}" if found.get("failed") else status,
        *(f"{errors[level]:.2g}" if level in errors else "" for level in ("L1", "L2", "L3")),
        *((f"{encode['seconds']:.1f}", f"{encode['peak'] / GIB:.1f}") if encode else ("", "")),
    )


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("sizes", __doc__, {"--depth": 32, "--page": None})
    parser.add_argument("what", choices=("plan", "released"))
    parser.add_argument("folder", **COMMON["folder"])
    parser.add_argument("--only", default="", help="the beginning of cells' names, such as '3B onnxruntime'")
    given = parser.parse_args(arguments)
    if given.what == "plan":
        text = plan_table(given.folder, given.only)
    else:
        text = released_table(given.folder, given.only, given.depth)
    publish(text, given.page, *marks("measured", "python -m benchmarks.sizes"))


if __name__ == "__main__":
    main(sys.argv[1:])
