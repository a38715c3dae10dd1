"""The towers of released sizes, through the commands: what they take on this machine.

`python -m tests.bench.full_size FOLDER --write docs/full_size.md` writes random checkpoints in sharded
bfloat16 into the folder, builds and checks them with every backend and encodes one image with each bundle,
every command in a process of its own. What the folder holds is not measured again, so it can be stopped and
gone on with; `--depth 4` tries it on small towers, `--only "3B onnxruntime"` takes the cells that begin so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vlexport.recipes.demo.qwen2_5_vl import THREE_BILLION, contents

from tests.runtime.three_billion import Took, vlexport
from vlexport.backends import backend_names, find_backend, runs_here
from vlexport.checkpoint.writing import write_checkpoint

# Width of tokens of the two released sizes; their towers are alike but for that.
WIDTHS = {"3B": 2048, "7B": 3584}
SHARDS = 4
SIDE = 448
GIB, MIB = 2**30, 2**20
NO_GPU = ("eager", "inductor", "onnxruntime", "openvino")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One tower with one backend in one precision."""

    tower: str
    backend: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.tower} {self.backend} {self.precision}"

    def words(self) -> list[str]:
        """What the command line is told beside the checkpoint."""
        able = {each.spelled: each for each in find_backend(self.backend).capabilities}[self.precision]
        quantise = ["--quantise", able.quantisation.name] if able.quantisation else []
        return ["--backend", self.backend, "--dtype", able.dtype, *quantise]


def cells(only: str = "") -> Iterator[Cell]:
    """Every backend of this machine that needs no GPU, in every precision."""
    here = [name for name in backend_names() if name in NO_GPU and runs_here(find_backend(name))]
    for tower, backend in product(WIDTHS, here):
        for able in find_backend(backend).capabilities:
            cell = Cell(tower=tower, backend=backend, precision=able.spelled)
            if cell.name.startswith(only):
                yield cell


def write(folder: Path, cell: Cell, depth: int) -> Path:
    """The checkpoint of a tower without a decoder; where precision is lost, blocks add less."""
    exact = cell.precision == "float32"
    place = folder / f"{cell.tower}-{depth}-{'sharp' if exact else 'scaled'}"
    if not place.is_dir():
        gain = 1.0 if exact else (2 * depth) ** -0.5
        tower = replace(THREE_BILLION, depth=depth, out=WIDTHS[cell.tower], branch_gain=gain)
        write_checkpoint(place, contents(replace(tower, with_decoder=False)), shards=SHARDS)
    return place


def measure(folder: Path, cell: Cell, depth: int = 32) -> dict[str, Any]:
    """What the commands took; the bundle is removed, because all of them together are 20 GB."""
    source = write(folder, cell, depth)
    built = vlexport("build", source, *cell.words(), "--into", folder / "engines", "--json")
    found: dict[str, Any] = {"depth": depth, "build": numbers(built)}
    if built.code not in (0, 3):
        return found
    told = json.loads(built.out)
    bundle = Path(told["bundle"])
    rows = told["parity"]["table"]["rows"]
    found |= {"status": told["parity"]["status"], "worst": worst(rows), "failed": failed(rows)}
    found["disk"] = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    image = folder / "image.png"
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(image)
    given = ("--image", image, "--out", folder / "out.safetensors", "--allow-failed", "--json")
    encoded = vlexport("encode", bundle, *given)
    found["encode"] = numbers(encoded)
    shutil.rmtree(bundle)
    return found


def numbers(took: Took) -> dict[str, Any]:
    last = "" if took.code == 0 else took.err.strip().splitlines()[-1][:300]
    return {"code": took.code, "seconds": round(took.seconds, 1), "peak": took.peak, "last": last}


def worst(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By level, the largest error that was compared with a limit."""
    found: dict[str, float] = {}
    for row in rows:
        error = row["metrics"].get("ratio", row["metrics"].get("relative_l2"))
        if error is not None and row["limits"]:
            found[row["level"]] = max(found.get(row["level"], 0.0), float(error))
    return found


def failed(rows: list[dict[str, Any]]) -> list[str]:
    """Levels and checks that did not pass."""
    return sorted(
        {f"{row['level']} {row['check']}" for row in rows if row["verdict"] in ("failed", "blocked")}
    )


HEAD = """# The towers of released sizes

The towers of Qwen2.5-VL 3B and 7B: 32 blocks of width 1280, 16 heads, inner width 3420, 670 million
weights; tokens of width 2048 and 3584. Random weights in {shards} shards of bfloat16, two processors, 24 GiB.
Every command ran in a process of its own: `vlexport build` with its accuracy check, then `vlexport encode` of
one image of 448x448 pixels. Errors are the largest of all samples.

The towers of the rows in float32 are sharp (std 1/sqrt(fan_in), queries and keys doubled), which shows
faults. They multiply rounding errors too: transformers' own bfloat16 is off by 0.44 on them, and every
precision but float32 fails its caps. The other rows are of towers whose blocks add 1/sqrt(2 x 32) as much, as
models are initialised. Rows that are not here have not been measured. Written by
`python -m tests.bench.full_size FOLDER --write docs/full_size.md`; `make test-full` holds the float32 rows.

| tower | backend | precision | build s | GiB | files MiB | accuracy | L1 | L2 ratio | L3 | encode s | GiB |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(found: Mapping[str, Any]) -> str:
    return HEAD.format(shards=SHARDS) + "".join(f"| {_line(name, each)} |\n" for name, each in found.items())


def _line(name: str, cell: Mapping[str, Any]) -> str:
    tower, backend, precision = name.split()
    build, encode, worst_of = cell["build"], cell.get("encode"), cell.get("worst", {})
    levels = [f"{worst_of[level]:.2g}" if level in worst_of else "" for level in ("L1", "L2", "L3")]
    status = cell.get("status", f"exit code {build['code']}")
    told = f"{status}: {', '.join(cell['failed'])}" if cell.get("failed") else status
    parts = (
        *(tower, f"`{backend}`", f"`{precision}`", f"{build['seconds']:.0f}", f"{build['peak'] / GIB:.1f}"),
        *(f"{cell['disk'] / MIB:,.0f}" if "disk" in cell else "", told, *levels),
        *((f"{encode['seconds']:.1f}", f"{encode['peak'] / GIB:.1f}") if encode else ("", "")),
    )
    return " | ".join(parts)


def main() -> None:
    """Measure what is not there yet, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.full_size", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--only", default="", help="the beginning of cells' names")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / f"cells-{given.depth}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for cell in cells(given.only):
        if cell.name not in found:
            found[cell.name] = measure(given.folder, cell, given.depth)
            kept.write_text(json.dumps(found, indent=1))
            sys.stderr.write(_line(cell.name, found[cell.name]) + "\n")
    if given.write:
        given.write.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
