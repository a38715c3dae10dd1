"""Cold start and build of this tree and of an older one, interleaved: every command in a process of its own.

`python -m benchmarks.opening FOLDER --old TREE [--old-python PYTHON]` writes a random checkpoint with the
vision tower of Qwen2.5-VL 3B, builds and checks it with both trees in turn (`onnxruntime`, float32), with
empty caches and once more, then encodes 448x448 images from both bundles in turn. A call of the tower is half
of what two images more take; files are in the page cache. What an encode takes beyond its call and reading is
opening. `--build backend=openvino quantize=int8` builds that instead. `--calls` measures calls of every
backend, four blocks of width 1280, in processes that take turns; then `import vlexport`, `--help`, and build
and check of a tiny checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.first_hour import GIB, MAIN, Step, apart, released_tower, step
from benchmarks.options import parser_of, trees
from benchmarks.tables import markdown, marks, publish

BACKENDS = {
    "eager": ("float32", "bfloat16"),
    "inductor": ("float32", "bfloat16"),
    "onnxruntime": ("float32", "int8"),
    "openvino": ("float32", "bfloat16", "int8"),
}
# Encodes an image for each line that it reads, another one each time, and answers with the seconds.
CALLER = """
import sys, time
import numpy as np
import vlexport
draw = np.random.default_rng(0)
with vlexport.load(sys.argv[1], allow_failed=True) as pipeline:
    for _ in sys.stdin:
        image = draw.integers(0, 256, (448, 448, 3), dtype=np.uint8)
        begun = time.perf_counter()
        pipeline.encode(image)
        print(time.perf_counter() - begun, flush=True)
"""


class Side:
    """A tree with its interpreter, its caches and its bundle."""

    # Backend and precision of its builds.
    options: Sequence[str] = ()
    check_words: Sequence[str] = ("check", "--accuracy")

    def __init__(self, name: str, tree: Path, python: str, folder: Path, memory: int) -> None:
        self.name, self.python, self.folder, self.memory = name, python, folder / name, memory
        self.variables = apart(self.folder, PYTHONPATH=str(tree))
        self.bundle = Path()

    def run(self, *words: object, program: str = MAIN, fine: Sequence[int] = (0,)) -> Step:
        line = [self.python, "-c", program, *words]
        found = step(str(words[0]), line, self.variables, self.memory, self.folder / "log")
        if found.code not in fine:
            sys.exit(f"{self.name}: {words}: exit code {found.code}\n{found.out[-3000:]}")
        return found

    def build(self, checkpoint: Path, number: int, *, first: bool) -> Step:
        """Build anew; nothing lies in the compile cache the first time."""
        self.variables = {**self.variables, "XDG_CACHE_HOME": str(self.folder / f"cache{number}")}
        into = f"engines{number}{'-first' if first else ''}"
        return self._built(checkpoint, into, "--profile", "image", *self.options)

    def _built(self, checkpoint: Path, into: str, *options: str) -> Step:
        words = ("build", checkpoint, *options, "--output-dir", self.folder / into, "--json")
        # A bundle that failed its check can be timed.
        found = self.run(*words, fine=(0, 3))
        start = re.search(r"^\{", found.out, re.MULTILINE)
        assert start is not None, found.out
        self.bundle = Path(json.JSONDecoder().raw_decode(found.out, start.start())[0]["bundle"])
        return found

    def caller(self, checkpoint: Path, backend: str, dtype: str) -> subprocess.Popen[str]:
        """Build, and return a process that encodes an image whenever it is told to."""
        precision = ("--quantize", dtype) if dtype == "int8" else ("--dtype", dtype)
        self._built(checkpoint, f"{backend}-{dtype}", "--backend", backend, "--profile", "image", *precision)
        return subprocess.Popen(
            [self.python, "-c", CALLER, str(self.bundle)],
            env=self.variables, cwd=self.folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def commands(self, checkpoint: Path, number: int) -> Mapping[str, Step]:
        """Run what a user waits for, on a tiny checkpoint."""
        return {
            "import vlexport": self.run("import", program="import vlexport"),
            "--help": self.run("--help"),
            "build of a tiny checkpoint": self._built(checkpoint, f"tiny{number}"),
            # Named `parity` until the verbs of 28 November 2026.
            "its check": self.run(*self.check_words, self.bundle),
        }

    def encode(self, images: Sequence[Path]) -> Step:
        given = [word for image in images for word in ("--image", image)]
        return self.run("encode", self.bundle, *given, "--output", self.folder / "out.safetensors")

    def reading(self) -> float:
        """Return the seconds that reading the weights takes, from the page cache."""
        began = time.monotonic()
        weights = max(self.bundle.iterdir(), key=lambda path: path.stat().st_size)
        with weights.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
        return time.monotonic() - began


def measured(
    sides: Sequence[Side], checkpoint: Path, images: Sequence[Path], builds: int, rounds: int
) -> str:
    """Return the table: medians, and ratios of the two sides in the same round."""
    found: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}

    def note(side: Side, what: str, value: float) -> None:
        found[side.name].setdefault(what, []).append(value)

    for number in range(builds):
        for side in sides[:: -1 if number % 2 else 1]:
            for first, what in ((True, "first build on a machine"), (False, "another build")):
                made = side.build(checkpoint, number, first=first)
                note(side, f"{what}, s", made.seconds)
                note(side, f"{what}, s of processors", made.busy)
                note(side, f"{what}, GiB", made.peak / GIB)
    for number in range(rounds):
        for side in sides[:: -1 if number % 2 else 1]:
            reading = side.reading()
            one, two, four = (side.encode(images[:count]) for count in (1, 2, 4))
            call = (four.seconds - two.seconds) / 2
            note(side, "encode of one image, s", one.seconds)
            note(side, "a call of the tower, s", call)
            note(side, "reading the weights, s", reading)
            note(side, "opening, s", one.seconds - call - reading)
            note(side, "encode of one image, GiB", one.peak / GIB)
            note(side, "encode of two images, GiB", two.peak / GIB)
    return compared(sides, found)


def calls(sides: Sequence[Side], checkpoint: Path, tiny: Path, rounds: int) -> str:
    """Return the table of calls of every backend, and of what a user waits for."""
    found: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
    for backend, dtype in ((name, dtype) for name, dtypes in BACKENDS.items() for dtype in dtypes):
        callers = {side.name: side.caller(checkpoint, backend, dtype) for side in sides}
        for number in range(-1, rounds):
            for name in list(callers)[:: -1 if number % 2 else 1]:
                told, answer = callers[name].stdin, callers[name].stdout
                assert told is not None
                assert answer is not None
                print(file=told, flush=True)
                seconds = float(answer.readline())
                if number >= 0:
                    found[name].setdefault(f"{backend} {dtype}, s", []).append(seconds)
        for caller in callers.values():
            caller.communicate()
        sys.stderr.write(compared(sides, found) + "\n")
    for number in range(rounds):
        for side in sides[:: -1 if number % 2 else 1]:
            for what, taken in side.commands(tiny, number).items():
                found[side.name].setdefault(f"{what}, s", []).append(taken.seconds)
    return compared(sides, found)


def compared(sides: Sequence[Side], found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    old, new = (found[side.name] for side in sides)
    rows = []
    for what, before in old.items():
        ratios = [b / a for a, b in zip(before, new[what], strict=True)]
        shown = (f"{statistics.median(values):.2f}" for values in (before, new[what], ratios))
        rows.append((what, *shown, f"{min(ratios):.2f} to {max(ratios):.2f}"))
    head = ("what", *(side.name for side in sides), "ratio", "over rounds")
    return "\n".join(markdown(head, rows))


def main(arguments: Sequence[str]) -> None:
    taken = {"folder": None, "--old": None, "--old-python": sys.executable, "--depth": 32, "--rounds": 5}
    parser = parser_of("opening", __doc__, {**taken, "--memory": 16, "--page": None})
    parser.add_argument("--builds", type=int, default=2)
    parser.add_argument("--calls", action="store_true", help="calls of every backend and short commands")
    parser.add_argument("--build", nargs="+", default=[], metavar="WORD", help="as 'backend=openvino'")
    given = parser.parse_args(arguments)
    folder = given.folder
    checkpoint = released_tower(folder, given.depth)
    # Equal images would share a call.
    images = [folder / f"image{number}.png" for number in range(4)]
    draw = np.random.default_rng(0)
    for image in images:
        Image.fromarray(draw.integers(0, 256, (448, 448, 3), dtype=np.uint8)).save(image)
    sides = [Side(*tree, round(given.memory * GIB)) for tree in trees(given)]
    if "\n  parity " in sides[0].run("--help").out:
        sides[0].check_words = ("parity",)
    for side in sides:
        side.options = [f"--{word}" for word in given.build]
    load = os.getloadavg()[0]
    if given.calls:
        sides[0].run("demo", "--recipe", "qwen2_5_vl", "--folder", folder / "tiny")
        (tiny,) = (path.parent for path in (folder / "tiny").rglob("config.json"))
        text = calls(sides, checkpoint, tiny, given.rounds)
    else:
        text = measured(sides, checkpoint, images, given.builds, given.rounds)
    text += (
        f"\n\n{given.depth} blocks, {given.builds} builds and {given.rounds} rounds, each side in "
        f"turn; load {load:.1f} before and {os.getloadavg()[0]:.1f} after on {os.cpu_count()} processors."
    )
    publish(text, given.page, *marks("measured", "python -m benchmarks.opening"))


if __name__ == "__main__":
    main(sys.argv[1:])
