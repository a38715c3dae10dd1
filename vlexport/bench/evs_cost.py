"""What pruning a video costs, against reading its embeddings once: `python -m vlexport.bench.evs_cost`.

T frames, N tokens per frame, D width, R = T * N rows.

Contenders run in random order within each round; a ratio is the median over rounds of a contender's time by
the time of the read in the same round, so that what slows the machine slows both. The twin is the same read
once more: its ratio says how far the run can be trusted. The read is the fastest we know: one pass of integer
maximum over the bytes.

Kept rows are new memory. From 32 MiB on (rate 0.5 here) the C library maps it afresh for every call, so the
page faults of the result, 1 to 2 reads, are in the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from vlexport.compiled.evs import EvsSelector, prune
from vlexport.compiled.packages import compiled
from vlexport.compiled.selectors import Selection, eager

FRAMES, PER_FRAME, WIDTH = 64, 256, 2048
READ, TWIN = "read", "read (twin)"

# What a compiled prune may cost, in reads.
LIMITS = {"exact compiled": 12.0, "snap compiled": 4.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: seconds per round, and the ratio to the read of the same round."""

    contender: str
    rate: float
    ratio: float
    samples: tuple[float, ...]
    limit: float | None


def moving_scene(seed: int) -> Tensor:
    """Embeddings (R, D) of a video in which half of the tokens stand still from frame to frame."""
    generator = torch.Generator().manual_seed(seed)
    noise_TND = torch.randn(FRAMES, PER_FRAME, WIDTH, generator=generator)
    moves_TN1 = torch.rand(FRAMES, PER_FRAME, 1, generator=generator) < 0.5
    walk_TND = (noise_TND * moves_TN1 * 0.3).cumsum(0) + noise_TND[:1]
    return walk_TND.flatten(0, 1).bfloat16()


def read(embeds_RD: Tensor) -> Tensor:
    """Every byte once."""
    return embeds_RD.view(-1).view(torch.int64).max()


def contenders(rate: float, selections: dict[str, Selection]) -> dict[str, Callable[[Tensor], object]]:
    """What is timed, by name."""

    def pruner(selection: Selection) -> Callable[[Tensor], object]:
        return lambda embeds_RD: prune(embeds_RD, (FRAMES, 1, PER_FRAME), 1, rate, selection)

    return {READ: read, TWIN: read, **{name: pruner(found) for name, found in selections.items()}}


def measure(embeds_RD: Tensor, rate: float, selections: dict[str, Selection], rounds: int) -> list[Row]:
    """Interleaved samples of every contender at one rate."""
    timed = contenders(rate, selections)
    order, samples = random.Random(0), {name: list[float]() for name in timed}
    for name in timed:
        timed[name](embeds_RD)
    for _ in range(rounds):
        for name in order.sample(sorted(timed), len(timed)):
            start = time.perf_counter()
            timed[name](embeds_RD)
            samples[name].append(time.perf_counter() - start)
    return [
        Row(
            contender=name,
            rate=rate,
            ratio=statistics.median(a / b for a, b in zip(samples[name], samples[READ], strict=True)),
            samples=tuple(samples[name]),
            limit=LIMITS.get(name),
        )
        for name in timed
    ]


def main(arguments: list[str]) -> int:
    """Print the table, store the samples if asked; 1 when a limit is passed."""
    parser = argparse.ArgumentParser(prog="python -m vlexport.bench.evs_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--eager", action="store_true", help="time the uncompiled forms too")
    parser.add_argument("--json", type=Path, help="file for the raw samples")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    exact, snap = EvsSelector(), EvsSelector(ties="snap")
    selections = {
        "exact compiled": compiled(exact, dtype="bfloat16"),
        "snap compiled": compiled(snap, dtype="bfloat16"),
    }
    if options.eager:
        selections |= {"exact eager": eager(exact), "snap eager": eager(snap)}
    embeds_RD = moving_scene(seed=0)
    rows = [row for rate in options.rates for row in measure(embeds_RD, rate, selections, options.rounds)]
    sys.stdout.write(table(rows, options.threads))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.limit is not None and row.ratio > row.limit for row in rows))


def table(rows: list[Row], threads: int) -> str:
    """The rows as text."""
    title = f"{FRAMES} x {PER_FRAME} tokens of width {WIDTH}, bfloat16, {threads} threads, "
    lines = [
        title + f"load {os.getloadavg()[0]:.1f}",
        f"{'contender':16} {'rate':>5} {'median':>10} {'ratio':>7}",
    ]
    for row in rows:
        verdict = "" if row.limit is None else f"  at most {row.limit:g}"
        time_ms = statistics.median(row.samples) * 1e3
        lines.append(f"{row.contender:16} {row.rate:5.2f} {time_ms:7.2f} ms {row.ratio:7.2f}{verdict}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
