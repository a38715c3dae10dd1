"""A bundle of the generic recipe next to the hand-written one of the same family, on the same weights.

`python -m benchmarks.generic` builds both on ONNX Runtime at width 1280, for each family, and runs them in
turn; it writes the ratios between the marks of docs/generic.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.company import opened
from benchmarks.options import parser_of
from benchmarks.tables import markdown, marks, publish
from benchmarks.towers import Grid, TowerSize, random_items, write_tower
from benchmarks.turns import in_turn, seconds_of
from vlexport._build.request import request
from vlexport.parity.samples import prepared

PAGE = Path(__file__).parents[1] / "docs" / "generic.md"
WIDE = TowerSize(depth=2, width=1280, heads=16, inner=3420, out=2048, full_blocks=(1,))
# Families, and towers with what sets each apart: windows, levels after two of three blocks.
FAMILIES = {"qwen2_5_vl": WIDE, "qwen3_vl": replace(WIDE, depth=3)}
# Patches: an image on the window grid, one off it, a video, and several at once.
CALLS: Mapping[str, tuple[Grid, ...]] = {
    "image, 1,024 patches": ((1, 32, 32),),
    "image off the window grid": ((1, 34, 26),),
    "video, 4 frames": ((4, 16, 24),),
    "two images and a video": ((1, 26, 18), (1, 32, 24), (2, 12, 16)),
}
MOST = 1.12


def compare(family: str, rounds: int, threads: int) -> list[tuple[str, ...]]:
    """Return a row for each call: median times, their ratio, the largest relative difference of outputs."""
    rows = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = write_tower(Path(name) / "tower", family, FAMILIES[family])
        subjects = [request(folder, "onnxruntime", recipe=recipe) for recipe in (family, "generic")]
        engines = [stack.enter_context(opened(subject, (threads,)))[0] for subject in subjects]
        for call, grids in CALLS.items():
            runs = {}
            for subject, engine in zip(subjects, engines, strict=True):
                items = random_items(subject.recipe, subject.config, grids)
                runs[subject.recipe.name] = partial(engine.run, prepared(subject, items))
            theirs, ours = (run() for run in runs.values())
            error = max(float((ours[each] - rows).norm() / rows.norm()) for each, rows in theirs.items())
            taken = in_turn({each: partial(seconds_of, run) for each, run in runs.items()}, rounds)
            ratio = statistics.median(b / a for a, b in zip(*taken.values(), strict=True))
            medians = (f"{1000 * statistics.median(seconds):.0f} ms" for seconds in taken.values())
            rows.append((f"`{family}`", call, *medians, f"{ratio:.2f}", f"{error:.0e}"))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Measure, write the page, and return 3 if the generic bundle is too slow."""
    given = parser_of("generic", __doc__, {"--rounds": 15, "--threads": 1}).parse_args(arguments)
    times = [row for family in FAMILIES for row in compare(family, given.rounds, given.threads)]
    head = ("family", "call", "its own recipe", "`generic`", "ratio", "difference")
    publish("\n".join(markdown(head, times)), PAGE, *marks("speed", "python -m benchmarks.generic"))
    return 3 if any(float(row[4]) > MOST for row in times) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
