"""Seconds of a patch as calls grow, of a tower of released size, beside the bare product of its precision.

`python -m benchmarks.growth FOLDER [--page docs/results/growth.md]` builds the random tower of 32 blocks once
for each backend and precision; a process of its own opens the bundle and encodes random pictures. Before and
after each call the bare product runs, which torch has in every precision. Attention's work grows with the
square of a picture: what a call takes beyond its products, over that work, is what bends a curve. What was
measured stays in FOLDER, and the next run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import parser_of
from benchmarks.patience import tower
from benchmarks.sizes import command
from benchmarks.tables import markdown, marks, publish, write_whole
from vlexport.target import processor_here

CONTENDERS = (
    "onnxruntime float32", "onnxruntime int8", "openvino float32", "openvino bfloat16", "openvino int8",
    "inductor float32", "inductor bfloat16", "inductor int8", "eager float32",
)  # fmt: skip
# Rows and columns in patches; the largest is one picture of 2576x1904.
GRIDS = {1024: (32, 32), 3700: (50, 74), 10764: (78, 138), 25024: (136, 184)}
DEPTH, FULL, WIDTH, INNER, WINDOW, PATCH, OUT = 32, 4, 1280, 3420, 64, 1176, 2048
# Multiplications and additions for a patch: linear layers, and attention for each patch that it sees.
LINEAR = 2 * (DEPTH * WIDTH * (4 * WIDTH + 3 * INNER) + PATCH * WIDTH + WIDTH * 4 * WIDTH + WIDTH * OUT)
SEEN = 4 * WIDTH
COLUMNS = (
    "engine", "patches", "seconds", "milliseconds a patch", "in ratio to the product", "the rest, GFLOP/s",
    "GiB",
)  # fmt: skip


def product(precision: str) -> float:
    """Return operations a second of a block's product, after the first."""
    import torch

    shape, dtype = (1024, WIDTH, INNER + 4), torch.int8 if precision == "int8" else getattr(torch, precision)
    rows, weights = (torch.ones(*pair).to(dtype) for pair in (shape[:2], shape[1:]))
    call = torch._int_mm if precision == "int8" else torch.mm  # noqa: SLF001  torch has no other name
    call(rows, weights)
    began, number = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < 1:
        call(rows, weights)
        number += 1
    return 2 * math.prod(shape) * number / taken


def calls(bundle: str, precision: str, sizes: Sequence[int], threads: int) -> None:
    """Open a bundle, call it once with the smallest picture, then with each; print a line for each."""
    import torch

    from vlexport.backends import Options
    from vlexport.runtime.encoder import EngineSession

    torch.set_num_threads(threads)
    session = EngineSession.open(bundle, options=Options(threads=threads), allow_failed=True)
    source = torch.Generator().manual_seed(0)
    for number, patches in enumerate((min(sizes), *sizes)):
        rows = torch.randn(patches, session.packing.row_width, generator=source)
        before = product(precision)
        began = time.perf_counter()
        session.run_packed(rows, [(1, *GRIDS[patches])])
        seconds = time.perf_counter() - began
        speed = (before + product(precision)) / 2
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {"patches": patches, "seconds": seconds, "speed": speed, "peak": peak}
        if number:
            sys.stdout.write(json.dumps(found | {"load": os.getloadavg()[0]}) + "\n")
            sys.stdout.flush()


def measured(folder: Path, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Build unless that was done, and call; what fails has its last line."""
    backend, _, precision = name.partition(" ")
    checkpoint, engines = tower(folder, DEPTH), folder / name.replace(" ", "-")
    chosen = ("--quantize", "int8") if precision == "int8" else ("--dtype", precision)
    limits = ("--max-pixels", 2576 * 1904, "--max-images", 1)
    built = command("build", checkpoint, "--backend", backend, *chosen, "--output-dir", engines, *limits)
    if built["code"] not in (0, 3):
        return {"reason": built["last"]}
    job = json.dumps([built["document"]["bundle"], precision, given.sizes, given.threads])
    words = [sys.executable, "-m", "benchmarks.growth", str(folder), "--job", job]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    reason = ran.stderr.strip().splitlines()[-1][:200] if ran.returncode else ""
    parity = built["document"]["parity"]["status"]
    return {"built": built["seconds"], "parity": parity, "calls": lines, "reason": reason}


def rows_of(name: str, found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each call; the rest is what attention and everything between products reach."""
    rows = []
    for call in found.get("calls", ()):
        patches, seconds = call["patches"], call["seconds"]
        linear = LINEAR * patches / call["speed"]
        attention = SEEN * patches * (FULL * patches + (DEPTH - FULL) * WINDOW)
        rest = f"{attention / (seconds - linear) / 1e9:.0f}" if seconds > linear else "-"
        shown = (f"{seconds:.1f}", f"{1e3 * seconds / patches:.2f}", f"{seconds / linear:.2f}", rest)
        rows.append((name, f"{patches:,}", *shown, f"{call['peak'] / 2**30:.1f}"))
    return rows + ([(name, found["reason"], *["-"] * 5)] if found.get("reason") else [])


def main(arguments: Sequence[str]) -> None:
    taken = {"folder": None, "--threads": os.cpu_count(), "--page": None}
    parser = parser_of("growth", __doc__, taken)
    parser.add_argument("--engines", nargs="+", default=list(CONTENDERS), help="as 'onnxruntime int8'")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(GRIDS), choices=GRIDS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job:
        calls(*given.job)
        return
    file = given.folder / "growth.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in given.engines:
        if name not in results:
            results[name] = measured(given.folder, name, given)
            write_whole(file, json.dumps(results, indent=1) + "\n")
    rows = [row for name, found in results.items() for row in rows_of(name, found)]
    done = [(name.split()[1], call) for name, found in results.items() for call in found.get("calls", ())]
    speeds: dict[str, float] = {}
    for precision, call in done:
        speeds[precision] = max(call["speed"] / 1e9, speeds.get(precision, 0))
    products = ", ".join(f"{precision} {speed:.0f} GOP/s" for precision, speed in speeds.items())
    loads = sorted(call["load"] for _, call in done)
    words = (
        f"{DEPTH} blocks, {given.threads} threads, one call of each size; bare products at their fastest: "
        f"{products}; {processor_here()}, load {loads[0]:.1f} to {loads[-1]:.1f}."
    )
    text = "\n".join([*markdown(COLUMNS, rows), "", words])
    publish(text, given.page, *marks("growth", "python -m benchmarks.growth"))


if __name__ == "__main__":
    main(sys.argv[1:])
