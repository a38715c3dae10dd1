"""How honest the time left of a first build is, and what its phases take by size of the tower.

`python -m benchmarks.patience FOLDER [--depths 0,8,32] [--rounds 3] [--page PAGE]` builds random towers of
width 1280 and so many blocks (0: the demo's), each with empty caches, and compares the time left that
`--progress json` printed at a tenth, a half and nine tenths of the way with what came. The table of phases is
that of `vlexport/_build/timings.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.first_hour import apart
from benchmarks.options import parser_of
from benchmarks.tables import markdown, marks, publish
from benchmarks.towers import TowerSize, default_recipe, write_tower
from vlexport.system import SAFE

MOMENTS = (0.1, 0.5, 0.9)


def tower(folder: Path, depth: int) -> Path:
    """Write a random tower, unless it is there."""
    tiny = TowerSize(depth=4, width=64, heads=4, inner=96, out=48, full_blocks=(3,))
    wide = TowerSize(
        depth=depth, width=1280, heads=16, inner=3420, out=2048,
        full_blocks=tuple(range(7, depth, 8)), branch_gain=(2 * max(depth, 1)) ** -0.5,
    )  # fmt: skip
    return write_tower(folder / f"blocks-{depth}", default_recipe(), wide if depth else tiny)


def first_build(checkpoint: Path, backend: str) -> tuple[list[dict[str, Any]], float]:
    """Build with empty caches; return what was printed on the way, and the seconds of the last line."""
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as place:
        words = ["build", str(checkpoint), "--backend", backend, "--output-dir", f"{place}/engines"]
        ran = subprocess.run(
            [sys.executable, "-m", "vlexport", "--progress", "json", *words],
            env=apart(Path(place), **SAFE), capture_output=True, text=True, check=False,
        )  # fmt: skip
    if ran.returncode:
        raise SystemExit(ran.stderr)
    events = [json.loads(line) for line in ran.stderr.splitlines() if line.startswith('{"event"')]
    return events, events[-1]["seconds"]


def phase_seconds(events: Sequence[Mapping[str, Any]], total: float) -> dict[str, float]:
    """Return the seconds of each phase, in order."""
    taken: dict[str, float] = {}
    ends = [*(event["seconds"] for event in events[1:]), total]
    for event, end in zip(events, ends, strict=True):
        name = re.sub(r" \d+( of \d+)?$", "", event["phase"])
        taken[name] = taken.get(name, 0.0) + end - event["seconds"]
    return taken


def honesty(events: Sequence[Mapping[str, Any]], total: float, moment: float) -> float:
    """Return the time left that was shown at a share of the way, in times of what came."""
    shown = [event for event in events if event["seconds"] <= moment * total][-1]
    return float(shown["seconds_left"]) / (total - float(shown["seconds"]))


def main(arguments: Sequence[str]) -> None:
    taken = {"folder": None, "--rounds": 3, "--backend": "onnxruntime", "--page": None}
    parser = parser_of("patience", __doc__, taken)
    parser.add_argument("--depths", default="0,8,32")
    options = parser.parse_args(arguments)
    depths = list(map(int, options.depths.split(",")))
    rows, phases = list[list[str]](), dict[str, dict[int, list[float]]]()
    for depth in depths:
        checkpoint = tower(options.folder, depth)
        for _ in range(options.rounds):
            events, total = first_build(checkpoint, options.backend)
            shown = [f"{honesty(events, total, moment):.2f}" for moment in MOMENTS]
            rows.append([str(depth or "demo"), f"{total:.0f}", *shown])
            for name, seconds in phase_seconds(events, total).items():
                phases.setdefault(name, {}).setdefault(depth, []).append(seconds)
            sys.stderr.write(f"{rows[-1]}\n")
    lines = markdown(["blocks", "seconds", *(f"left at {moment:.0%}" for moment in MOMENTS)], rows)
    medians = [
        [name, *(f"{median(taken[depth]):.1f}" if depth in taken else "" for depth in depths)]
        for name, taken in phases.items()
    ]
    towers = (f"{depth} blocks" if depth else "demo" for depth in depths)
    lines += ["", *markdown(["seconds", *towers], medians)]
    publish("\n".join(lines), options.page, *marks("time left", "python -m benchmarks.patience"))


if __name__ == "__main__":
    main(sys.argv[1:])
