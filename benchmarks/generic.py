"""A bundle of the generic recipe next to the hand-written one of the same family, on the same weights.

`python -m benchmarks.generic` builds both on ONNX Runtime at width 1280, for each family, and runs them in
turn; it writes the ratios between the marks of docs/generic.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from benchmarks.tables import markdown, write_between
from benchmarks.towers import Grid, TowerSize, random_items, write_tower
from vlexport._build.export import export
from vlexport.backends import Engine, EngineSpec, Folder, Options
from vlexport.backends.onnxruntime import BACKEND
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import find_recipe

PAGE = Path(__file__).parents[1] / "docs" / "generic.md"
BEGIN, END = "<!-- speed, written by `python -m benchmarks.generic` -->", "<!-- end of speed -->"
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


class Contender:
    """An engine of one recipe on the weights of a checkpoint."""

    def __init__(self, recipe: str, folder: Path, out: Path, threads: int) -> None:
        self.recipe, checkpoint = find_recipe(recipe), Checkpoint.open(folder)
        self.config = self.recipe.read_config(checkpoint)
        out.mkdir(parents=True)
        graph = export(self.recipe, checkpoint)
        BACKEND.build(graph, BACKEND.options(), out)
        spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
        self.engine = Engine(BACKEND.open(Folder(out), spec, Options(threads=threads)), spec)

    def inputs(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        items = random_items(self.recipe, self.config, grids)
        return self.recipe.prepare(self.config, items, BACKEND.form)


def compare(family: str, rounds: int, threads: int) -> list[tuple[str, ...]]:
    """Return a row for each call: median times, their ratio, the largest relative difference of outputs."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_tower(Path(name) / "tower", family, FAMILIES[family])
        own, generic = (
            Contender(recipe, folder, Path(name) / recipe, threads) for recipe in (family, "generic")
        )
        rows = []
        for call, grids in CALLS.items():
            given = {each: each.inputs(grids) for each in (own, generic)}
            theirs, ours = (each.engine.run(given[each]) for each in (own, generic))
            error = max(float((ours[each] - rows).norm() / rows.norm()) for each, rows in theirs.items())
            taken: dict[Contender, list[float]] = {own: [], generic: []}
            for number in range(rounds):
                for each in (own, generic) if number % 2 else (generic, own):
                    start = time.perf_counter()
                    each.engine.run(given[each])
                    taken[each].append(time.perf_counter() - start)
            ratio = statistics.median(b / a for a, b in zip(taken[own], taken[generic], strict=True))
            medians = (f"{1000 * statistics.median(taken[each]):.0f} ms" for each in (own, generic))
            rows.append((f"`{family}`", call, *medians, f"{ratio:.2f}", f"{error:.0e}"))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Measure, write the page, and return 3 if the generic bundle is too slow."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.generic", description=__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args(arguments)
    times = [row for family in FAMILIES for row in compare(family, given.rounds, given.threads)]
    head = ("family", "call", "its own recipe", "`generic`", "ratio", "difference")
    lines = markdown(head, times)
    write_between(PAGE, BEGIN, END, "\n".join(lines))
    sys.stdout.write("\n".join(lines) + "\n")
    return 3 if any(float(row[4]) > MOST for row in times) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
