"""Whether an item's rows have the same bits in any company: alone, in mixes, in another order, cut.

`python -m benchmarks.company` measures tiny towers of all families on the backends of a processor, with one
thread and two, and writes docs/results/company.md; `--wide COUNT` adds towers of width 1280, two blocks deep,
on ONNX Runtime. Rows of what is not measured stay as they are.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.tables import markdown, marks, write_between
from vlexport._build.export import trace
from vlexport._build.request import request
from vlexport._build.spec import BuildSpec
from vlexport.backends import Engine, EngineSpec, Folder, Options
from vlexport.errors import InputError, LimitError
from vlexport.parity.samples import prepared, random_items
from vlexport.specs import MediaItem
from vlexport.target import processor_here

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "kimi_vl", "minicpmv", "nemotron_vl")
BACKENDS = ("onnxruntime", "onnxruntime int8", "inductor", "eager", "openvino")
ON_ONNXRUNTIME = BACKENDS[:2]
WIDE: dict[str, Any] = {"depth": 2, "hidden": 1280, "heads": 16, "inner": 2560, "levels": (0, 1)}
WIDE |= {"with_decoder": False}
PAGE = Path(__file__).parents[1] / "docs/results/company.md"
BEGIN, END = marks("measured", "python -m benchmarks.company")
Rows = list[torch.Tensor]


@contextmanager
def opened(subject: BuildSpec, threads: Sequence[int]) -> Iterator[list[Engine]]:
    """Yield one engine for each number of threads."""
    graph, backend = trace(subject), subject.backend
    assert backend is not None
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    with tempfile.TemporaryDirectory() as place:
        backend.build(graph, Options(), Path(place))
        engines = [
            Engine(backend.open(Folder(Path(place)), spec, Options(threads=count)), spec) for count in threads
        ]
        yield engines
        for engine in engines:
            engine.close()


def rows_of(engine: Engine, subject: BuildSpec, items: Sequence[MediaItem]) -> Rows:
    """Return all outputs of each item, side by side."""
    outputs = engine.run(prepared(subject, items))
    counts = [subject.recipe.num_tokens(subject.config, item) for item in items]
    return list(torch.cat([outputs[name] for name in sorted(outputs)], dim=1).split(counts))


def drawn(subject: BuildSpec, source: random.Random, most: int) -> tuple[MediaItem, ...]:
    """Return a random mix of what the recipe's own mixes are made of, of other sizes where it has none."""
    merge, mixes = subject.recipe.merge(subject.config), subject.recipe.shape_sets(subject.config).values()
    legal = sorted({shape for mix in mixes for shape in mix})
    is_free = len({grid for _, grid in legal}) > 4

    def shape() -> tuple[str, tuple[int, int, int]]:
        kind, grid = source.choice(legal)
        if not is_free or source.random() < 0.3:
            return kind, grid
        side = max(1, math.isqrt(most) // merge)
        return kind, (grid[0], merge * source.randint(1, side), merge * source.randint(1, side))

    mix = [shape() for _ in range(source.randint(2, 6))]
    return random_items(subject.recipe, subject.config, mix, seed=source.randint(0, 10**9))


def differing(engine: Engine, subject: BuildSpec, count: int, most: int) -> tuple[int, int, float]:
    """Return how many items have other bits than alone, of how many, and the largest error."""
    source, wrong, total, largest = random.Random(0), 0, 0, 0.0
    done = 0
    while done < count:
        try:
            items = drawn(subject, source, most)
            alone = [rows_of(engine, subject, [item])[0] for item in items]
            order = source.sample(range(len(items)), len(items))
            cut = source.randint(1, len(items) - 1)
            mixed = rows_of(engine, subject, items)
            turned = rows_of(engine, subject, [items[at] for at in order])
            shuffled = dict(zip(order, turned, strict=True))
            parts = rows_of(engine, subject, items[:cut]) + rows_of(engine, subject, items[cut:])
        except (InputError, LimitError):
            # Larger than the profile, or no legal size of the family.
            continue
        done += 1
        for at, rows in enumerate(alone):
            others = (mixed[at], shuffled[at], parts[at])
            total += 1
            wrong += not all(torch.equal(rows, other) for other in others)
            largest = max(largest, *(float((rows - other).norm() / rows.norm()) for other in others))
    return wrong, total, largest


def measured(
    name: str, folder: Path, mixes: tuple[int, int], backend: str, several: Sequence[int]
) -> Iterator[list[str]]:
    """Yield a row of the table for each number of threads; `mixes` are how many, of how many patches."""
    library, _, scheme = backend.partition(" ")
    subject = request(folder, library, quantize=scheme or None)
    with opened(subject, several) as engines:
        for threads, engine in zip(several, engines, strict=True):
            torch.set_num_threads(threads)
            wrong, total, largest = differing(engine, subject, *mixes)
            error = f"{largest:.0e}" if wrong else "0"
            row = [backend, name, str(threads), f"{wrong} of {total:,}", error]
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
            yield row


def _rows_of_page() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return table[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=850, help="mixes of each tiny tower on ONNX Runtime")
    parser.add_argument("--wide", type=int, default=0, help="mixes of each tower of width 1280")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    options = parser.parse_args()
    measures = [backend for backend in BACKENDS if backend in options.backends]
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory() as place:
        for family in options.families:
            demo = importlib.import_module(f"vlexport.recipes.demo.{family}")
            folder = write_checkpoint(Path(place) / family, demo.contents(), seed=0)
            for backend in measures:
                count = options.count if backend in ON_ONNXRUNTIME else options.count // 10
                rows += measured(f"{family}, tiny", folder, (count, 400), backend, options.threads)
            if options.wide:
                sizes = {field.name for field in fields(demo.DEFAULT)} & WIDE.keys()
                contents = demo.contents(replace(demo.DEFAULT, **{name: WIDE[name] for name in sizes}))
                wide = write_checkpoint(Path(place) / "wide" / family, contents, seed=0)
                for backend in ON_ONNXRUNTIME:
                    name, mixes = f"{family}, width 1280", (options.wide, 100)
                    rows += measured(name, wide, mixes, backend, options.threads)
    kept = {tuple(row[:3]): row for row in _rows_of_page()} | {tuple(row[:3]): row for row in rows}
    names = ("backend", "tower", "threads", "items with other bits", "largest error")
    lines = [f"On {processor_here()}.", "", *markdown(names, sorted(kept.values()))]
    write_between(PAGE, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()
