"""The cost of pruning a video: in reads of its embeddings, and beside the tower that made them.

Contenders run in random order within each round and ratios are paired by round. A read is one pass of integer
maximum over the bytes, the fastest we know; its twin shows how far the run can be trusted. From 32 MiB on the
C library maps kept rows afresh for every call, and page faults cost 5 reads in pages of 4 KiB; with
THP_MEM_ALLOC_ENABLE=1 torch requests large pages. Exit status 1: a limit is passed.

T frames, N tokens per frame, D width, R = T * N rows, K kept.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.options import parser_of
from benchmarks.packages import packaged
from benchmarks.plans import Contender
from benchmarks.run import describe_machine
from benchmarks.tables import markdown, marks, publish
from benchmarks.towers import Grid, TowerSize, default_recipe, random_items, write_tower
from benchmarks.turns import in_turn, seconds_of
from benchmarks.worker import Job, Server
from vlexport._build.build import build
from vlexport._build.token_graphs import TokenGraphs
from vlexport.evaluate.intervals import paired
from vlexport.positions.mrope import pruned_positions
from vlexport.positions.rules import PlacedMedia, PositionRule, PromptPositions, merged_sides, num_tokens
from vlexport.pruning.evs import EvsSelector, prune
from vlexport.pruning.selectors import eager

FRAMES, PER_FRAME, WIDTH = 64, 256, 2048
# What a compiled prune may cost, in reads, and pruning with positions, in towers.
LIMITS = {"exact compiled": 12.0, "snap compiled": 4.0}
SHARE_LIMIT = 0.002
OPENING_LIMIT_S = 0.3

SIZE = TowerSize(depth=8, width=1280, heads=16, inner=3420, out=2048, full_blocks=(7,))
SMALL = TowerSize(depth=2, width=64, heads=2, inner=96, out=64, full_blocks=(1,))
GRIDS: tuple[Grid, ...] = ((2, 32, 32), (8, 32, 32))
# The fastest float32 engine that every machine has: a slower one makes the share smaller.
ENGINE = Contender(name="onnxruntime float32", kind="ours", library="onnxruntime")
RATE, MERGE = 0.75, 2
# Text before and after the video.
TEXT = (40, 20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: seconds per round, and the ratio to the first contender's of the same round."""

    contender: str
    rate: float
    samples: list[float]
    ratio: float
    limit: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def is_exceeded(self) -> bool:
        return self.limit is not None and self.ratio > self.limit


def rows_of(samples: Mapping[str, list[float]], rate: float, limits: Mapping[str, float]) -> list[Row]:
    """Return a row for each contender; ratios are against the first one."""
    base = next(iter(samples.values()))
    return [
        Row(
            contender=name,
            rate=rate,
            samples=seconds,
            ratio=paired(seconds, base).median,
            limit=limits.get(name),
        )
        for name, seconds in samples.items()
    ]


def moving_scene(seed: int) -> Tensor:
    """Return embeddings (R, D) of a video in which half of the tokens stand still from frame to frame."""
    generator = torch.Generator().manual_seed(seed)
    noise_TND = torch.randn(FRAMES, PER_FRAME, WIDTH, generator=generator)
    moves_TN1 = torch.rand(FRAMES, PER_FRAME, 1, generator=generator) < 0.5
    walk_TND = (noise_TND * moves_TN1 * 0.3).cumsum(0) + noise_TND[:1]
    return walk_TND.flatten(0, 1).bfloat16()


def compiled(method: str, dtype: str) -> TokenGraphs:
    """Return the graphs as a bundle holds them; what runs eagerly is not timed as compiled."""
    graphs = packaged(method, dtype)
    if graphs.form != "compiled":
        raise RuntimeError(f"the graphs are not compiled: {graphs.reason}")
    return graphs


def reads(embeds_RD: Tensor, rate: float, rounds: int, *, with_eager: bool) -> list[Row]:
    """Time the forms of the selector against a read, interleaved."""
    exact, snap = EvsSelector(), EvsSelector(ties="snap")
    forms = {
        "exact compiled": compiled(exact.name, "bfloat16").selection,
        "snap compiled": compiled(snap.name, "bfloat16").selection,
        **({"exact eager": eager(exact), "snap eager": eager(snap)} if with_eager else {}),
    }

    def read() -> Tensor:
        return embeds_RD.view(-1).view(torch.int64).max()

    calls: dict[str, Callable[[], object]] = {"read": read, "read (twin)": read}
    for name, selection in forms.items():
        calls[name] = partial(prune, embeds_RD, (FRAMES, 1, PER_FRAME), 1, rate, selection)
    samples = in_turn({name: partial(seconds_of, call) for name, call in calls.items()}, rounds)
    return rows_of(samples, rate, LIMITS)


def shares(
    rounds: int, threads: int, size: TowerSize = SIZE, grids: tuple[Grid, ...] = GRIDS
) -> dict[Grid, list[Row]]:
    """Time the tower and then, on its output, the graphs of a bundle: prune and positions."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        tower = write_tower(Path(place) / "tower", default_recipe(), size)
        server = Server(Job(contender=ENGINE, tower=tower, folder=Path(place) / "engine", threads=threads))
        server.open(server.build()[1])
        for grid in grids:
            server.load(random_items(server.recipe, server.config, [grid]))
            after = afterwards(grid)
            samples: dict[str, list[float]] = {"tower": [], "prune and positions": []}
            for index in range(rounds + 1):
                start = time.perf_counter()
                tokens_RD = server.run()
                between = time.perf_counter()
                after(tokens_RD)
                if index:  # the first round is a warm-up
                    samples["tower"].append(between - start)
                    samples["prune and positions"].append(time.perf_counter() - between)
            found[grid] = rows_of(samples, RATE, {"prune and positions": SHARE_LIMIT})
    return found


def afterwards(grid: Grid) -> Callable[[Tensor], tuple[Tensor, PromptPositions]]:
    """Return what follows the tower: prune its tokens, and number the prompt that the kept ones stand in."""
    graphs = compiled("evs", "float32")
    rule = PositionRule(kind="time_scaled", merge=MERGE, tokens_per_second=2)
    rows, columns = merged_sides(grid, MERGE)
    kept = EvsSelector().retained_count(rows * columns, grid[0], RATE)
    video = PlacedMedia(modality="video", offset=TEXT[0], length=kept, grid=grid, seconds_per_grid=1.0)

    def call(tokens_RD: Tensor) -> tuple[Tensor, PromptPositions]:
        pruned = prune(tokens_RD, grid, MERGE, RATE, graphs.selection)
        return pruned.embeds, pruned_positions(
            kept + sum(TEXT), [video], [pruned.kept], rule, write=graphs.write_kept
        )

    return call


# Prints the seconds that a process takes to open a bundle.
OPEN = """
import sys, time
import torch, vlexport.runtime.pipeline as library
started = time.perf_counter()
library.load(sys.argv[1]).close()
print(time.perf_counter() - started)
"""


def openings(rounds: int) -> dict[str, list[float]]:
    """Open the same bundle with packages and without, in fresh processes and in turn."""
    with tempfile.TemporaryDirectory() as place:
        source = write_tower(Path(place) / "tower", default_recipe(), SMALL)
        bundles = {}
        for name, cxx in (("compiled", os.environ.get("CXX", "g++")), ("eager", "/nowhere")):
            with patch.dict(os.environ, {"CXX": cxx}):
                bundles[name] = build(source, "onnxruntime", output_dir=Path(place) / name).path
        return in_turn({name: partial(opening, path) for name, path in bundles.items()}, rounds)


def opening(bundle: Path) -> float:
    words = [sys.executable, "-c", OPEN, str(bundle)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def opening_cost(found: Mapping[str, Sequence[float]]) -> float:
    """Return how much longer it takes to open a bundle with packages: median over rounds."""
    pairs = zip(found["compiled"], found["eager"], strict=True)
    return statistics.median(one - other for one, other in pairs)


def page(
    rows: list[Row], found: Mapping[Grid, list[Row]], opened: Mapping[str, Sequence[float]], threads: int
) -> str:
    pages = "large" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "small"
    scene = (
        f"{FRAMES} x {PER_FRAME} tokens of width {WIDTH}, bfloat16, {threads} threads of torch "
        f"{torch.__version__}, {pages} pages, load {os.getloadavg()[0]:.1f}; a read is one pass over the "
        "embeddings."
    )
    costs = []
    for row in rows:
        numbers = (f"{value:.2f}" for value in (row.rate, row.median * 1e3, row.ratio))
        costs.append((row.contender, *numbers, "" if row.limit is None else f"{row.limit:g}"))
    tower = (
        f"A tower of width {SIZE.width}, depth {SIZE.depth}, one block of full attention, float32 in "
        f"onnxruntime, {threads} threads of torch {torch.__version__}; rate {RATE}; a share may be "
        f"{SHARE_LIMIT:.1%}."
    )
    parts = []
    for grid, (whole, pruning) in found.items():
        video = (f"{' x '.join(map(str, grid))} patches", str(num_tokens(grid, MERGE)))
        seconds = (f"{whole.median:.2f} s", f"{pruning.median * 1e3:.2f} ms")
        parts.append((*video, *seconds, f"{pruning.ratio:.3%}"))
    head = ("contender", "rate", "milliseconds", "reads", "may be")
    columns = ("video", "tokens", "tower", "prune and positions", "share")
    lines = [scene, "", *markdown(head, costs), "", tower, "", *markdown(columns, parts)]
    plain, more = statistics.median(opened["eager"]), opening_cost(opened)
    cost = (
        f"Opening a tiny bundle in a fresh process: {plain:.2f} s with eager graphs, {more:+.3f} s with "
        f"packages (medians of {len(opened['eager'])} rounds; {OPENING_LIMIT_S:g} s more are allowed)."
    )
    lines += ["", cost]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    taken = {"--rounds": 40, "--threads": torch.get_num_threads(), "--out": None, "--page": None}
    parser = parser_of("pruning", __doc__, taken)
    parser.add_argument("--tower-rounds", type=int, default=5, help="of the comparison with the tower")
    parser.add_argument("--opening-rounds", type=int, default=7, help="of opening a bundle")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--eager", action="store_true", help="time the uncompiled forms too")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    scene = moving_scene(seed=0)
    rows = [row for rate in given.rates for row in reads(scene, rate, given.rounds, with_eager=given.eager)]
    found, opened = shares(given.tower_rounds, given.threads), openings(given.opening_rounds)
    text = page(rows, found, opened, given.threads)
    publish(text, given.page, *marks("pruning", "python -m benchmarks.pruning --page"))
    if given.out:
        towers = [
            {"grid": grid, "tower": tower.samples, "pruning": pruning.samples}
            for grid, (tower, pruning) in found.items()
        ]
        samples = {"reads": [asdict(row) for row in rows], "towers": towers, "openings": opened}
        stored = {"schema": 1, "machine": describe_machine(given.threads), **samples}
        given.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    exceeded = any(row.is_exceeded for row in [*rows, *(row for pair in found.values() for row in pair)])
    return int(exceeded or opening_cost(opened) > OPENING_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
