"""What pruning a video costs, against reading its embeddings once.

T frames, N tokens per frame, D width, R = T * N rows.

Contenders run in random order within each round; a ratio is the median over rounds of a contender's time by
the time of the read in the same round, so that what slows the machine slows both. The twin is the same read
once more: its ratio says how far the run can be trusted. The read is the fastest we know: one pass of integer
maximum over the bytes.

Kept rows are new memory. From 32 MiB on (rate 0.5 here) the C library maps it afresh for every call, and its
page faults cost 5 reads in pages of 4 KiB; with THP_MEM_ALLOC_ENABLE=1 torch asks for large pages, and they
cost nothing that can be measured.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

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


def selections(*, with_eager: bool) -> dict[str, Selection]:
    """The forms of the selector that are timed, by name."""
    exact, snap = EvsSelector(), EvsSelector(ties="snap")
    found = {
        "exact compiled": compiled(exact, dtype="bfloat16"),
        "snap compiled": compiled(snap, dtype="bfloat16"),
    }
    if with_eager:
        found |= {"exact eager": eager(exact), "snap eager": eager(snap)}
    return found


def _pages() -> str:
    return "large pages" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "small pages"


def table(rows: list[Row], threads: int) -> str:
    """The rows as Markdown."""
    lines = [
        (
            f"{FRAMES} x {PER_FRAME} tokens of width {WIDTH}, bfloat16, {threads} threads of torch "
            f"{torch.__version__}, {_pages()}, load {os.getloadavg()[0]:.1f}; a read is one pass over the "
            "embeddings."
        ),
        "",
        "| contender | rate | milliseconds | reads | may be |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        time_ms, limit = statistics.median(row.samples) * 1e3, "" if row.limit is None else f"{row.limit:g}"
        lines.append(f"| {row.contender} | {row.rate:.2f} | {time_ms:.2f} | {row.ratio:.2f} | {limit} |")
    return "\n".join(lines) + "\n"
