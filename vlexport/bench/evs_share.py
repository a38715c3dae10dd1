"""What pruning a video and numbering its prompt anew cost beside the tower that made the embeddings.

T frames of N tokens, R = T * N rows, K kept.

Each round times the tower and then, on what it gave, the compiled prune with the new positions; the share is
the median over rounds of the second by the first. The tower is the fastest float32 engine that every machine
has, so that a slower one makes the share smaller.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vlexport.bench.contenders import Contender
from vlexport.bench.models import Grid, TowerSize, contents_of, default_recipe, random_items, write_tower
from vlexport.bench.serving import Served, build_files, job_for, serve
from vlexport.compiled.evs import EvsSelector, prune
from vlexport.compiled.mrope import pruned_positions
from vlexport.compiled.packages import compiled
from vlexport.compiled.positions import PlacedMedia, PositionRule, PromptPositions, merged_sides, num_tokens

SIZE = TowerSize(depth=8, width=1280, heads=16, inner=3420, out=2048, full_blocks=(7,))
GRIDS: tuple[Grid, ...] = ((2, 32, 32), (8, 32, 32))
ENGINE = Contender(name="onnxruntime float32", kind="ours", library="onnxruntime")

# What pruning and positions may take, in towers.
LIMIT = 0.005
RATE, MERGE = 0.75, 2
# Text before and after the video.
TEXT = (40, 20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One video: seconds of each round, and the median share."""

    grid: Grid
    tower: tuple[float, ...]
    pruning: tuple[float, ...]

    @property
    def share(self) -> float:
        return statistics.median(b / a for a, b in zip(self.tower, self.pruning, strict=True))


def measure(
    rounds: int, threads: int, size: TowerSize = SIZE, grids: tuple[Grid, ...] = GRIDS
) -> list[Share]:
    """Build a random tower in a temporary folder, and measure every video with it."""
    with tempfile.TemporaryDirectory() as place:
        tower = write_tower(Path(place) / "tower", contents_of(default_recipe(), size))
        job = job_for(ENGINE, tower, Path(place) / "engine", threads, (1, 1, 1))
        build_files(job, [])
        served, config = serve(job), job.recipe.read_config(job.checkpoint)
        found = []
        for grid in grids:
            served.take(random_items(job.recipe, config, [grid]))
            found.append(_measured(served, grid, rounds))
        return found


def _measured(served: Served, grid: Grid, rounds: int) -> Share:
    after = afterwards(grid)
    after(served.run())
    tower, pruning = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        tokens_RD = served.run()
        between = time.perf_counter()
        after(tokens_RD)
        tower.append(between - start)
        pruning.append(time.perf_counter() - between)
    return Share(grid=grid, tower=tuple(tower), pruning=tuple(pruning))


def afterwards(grid: Grid) -> Callable[[Tensor], tuple[Tensor, PromptPositions]]:
    """What follows the tower: prune its tokens, and number the prompt that the kept ones stand in."""
    selection = compiled(EvsSelector(), dtype="float32")
    rule = PositionRule(kind="time_scaled", merge=MERGE, tokens_per_second=2)
    rows, columns = merged_sides(grid, MERGE)
    kept = EvsSelector().retained_count(rows * columns, grid[0], RATE)
    video = PlacedMedia(modality="video", offset=TEXT[0], length=kept, grid=grid, seconds_per_grid=1.0)

    def call(tokens_RD: Tensor) -> tuple[Tensor, PromptPositions]:
        assert len(tokens_RD) == num_tokens(grid, MERGE)
        pruned = prune(tokens_RD, grid, MERGE, RATE, selection)
        return pruned.embeds, pruned_positions(kept + sum(TEXT), [video], [pruned.kept], rule)

    return call


def table(found: list[Share], threads: int) -> str:
    """The shares as Markdown."""
    size = SIZE
    lines = [
        (
            f"A tower of width {size.width}, depth {size.depth}, one block of full attention, float32 in "
            f"onnxruntime, {threads} threads of torch {torch.__version__}; rate {RATE}; a share may be "
            f"{LIMIT:.1%}."
        ),
        "",
        "| video | tokens | tower | prune and positions | share |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        frames, rows, columns = each.grid
        tower, pruning = statistics.median(each.tower), statistics.median(each.pruning)
        lines.append(
            f"| {frames} x {rows} x {columns} patches | {num_tokens(each.grid, MERGE)} | {tower:.2f} s "
            f"| {pruning * 1e3:.2f} ms | {each.share:.3%} |"
        )
    return "\n".join(lines) + "\n"
