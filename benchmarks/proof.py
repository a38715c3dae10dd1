"""What the proof of a bundle takes beyond opening it: `vlexport check BUNDLE --run` beside small pictures.

`python -m benchmarks.proof FOLDER [--backend onnxruntime] [--depth 32] [--rounds 3] [--page PAGE]` builds a
random tower of width 1280, unless it is there, and runs both commands in turn. Both open the bundle as `load`
does; `encode` of a single picture leaves weights as they are stored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from PIL import Image

from benchmarks.first_hour import GIB, Step, apart, step
from benchmarks.options import parser_of
from benchmarks.patience import tower
from benchmarks.tables import markdown, marks, publish
from vlexport.system import SAFE


def command(folder: Path, *words: object) -> Step:
    """Run vlexport in caches of the folder's own."""
    line = [sys.executable, "-m", "vlexport", *words]
    done = step(str(words[0]), line, apart(folder, **SAFE), 16 * GIB, folder / "log")
    if done.code:
        sys.exit(f"{words}: exit code {done.code}\n{done.out[-3000:]}")
    return done


def main(arguments: Sequence[str]) -> None:
    taken = {"folder": None, "--backend": "onnxruntime", "--depth": 32, "--rounds": 3, "--page": None}
    options = parser_of("proof", __doc__, taken).parse_args(arguments)
    folder = options.folder
    pictures = [folder / "one.png", folder / "two.png"]
    for picture in pictures:
        Image.effect_noise((56, 56), 100).convert("RGB").save(picture)
    into = ("--backend", options.backend, "--output-dir", folder / "engines", "--quiet")
    built = command(folder, "build", tower(folder, options.depth), *into)
    bundle = Path(built.out.splitlines()[-1])
    small, proof = list[Step](), list[Step]()
    for _ in range(options.rounds):
        small.append(command(folder, "encode", bundle, *pictures, "-o", folder / "rows.safetensors"))
        proof.append(command(folder, "check", bundle, "--run"))
    pairs = list(zip(small, proof, strict=True))
    more = median(after.seconds - before.seconds for before, after in pairs)
    times = max(after.peak / before.peak for before, after in pairs)
    rows = [
        [name, f"{median(s.seconds for s in steps):.1f}", f"{max(s.peak for s in steps) / GIB:.2f}"]
        for name, steps in (("encode, two 56x56 pictures", small), ("check --run", proof))
    ]
    words = (
        f"{options.depth} blocks, {options.backend}, {options.rounds} rounds in turn: {more:.1f} s more "
        f"(median), at most {times:.2f} times the memory; load {os.getloadavg()[0]:.1f}."
    )
    text = "\n".join([*markdown(("command", "s", "GiB"), rows), "", words])
    publish(text, options.page, *marks("proofs", "python -m benchmarks.proof"))
    sys.stdout.write(proof[-1].out)


if __name__ == "__main__":
    main(sys.argv[1:])
