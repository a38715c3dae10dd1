"""Answers of every verb in an older tree and in this one: `--json`, exit codes, embeddings and answers.

`python -m benchmarks.frozen FOLDER --old TREE [--old-python PYTHON]` writes tiny checkpoints of every recipe
with the older tree, runs the same commands with both, and prints what differs, value by value. Paths are
written as names; times, sizes of memory and digests that contain a date are left out. A redesign is done when
nothing is printed that its page does not list. Exit status 1 where something differs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.first_hour import MAIN, apart
from benchmarks.options import parser_of, trees

RECIPES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "nemotron_vl", "minicpmv", "kimi_vl")
# Every pair that runs on a processor.
PRECISIONS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "eager": ((), ("--dtype", "bfloat16")),
    "onnxruntime": ((), ("--quantize", "int8"), ("--input-dtype", "uint8")),
    "openvino": ((), ("--quantize", "int8")),
    "inductor": ((),),
    "tensorrt_rtx": (("--dtype", "float16", "--targets", "sm89", "--profile", "thumbnail"),),
}
# Measured anew by each run, or named by the day.
VOLATILE = re.compile(
    r"(seconds|_s|bytes|memory|created|date|time|took|rss|free|digest|sha256|key|manifest|trust|versions?|ms|rate"
    r"|seal|subject|path|bundle|first|second|contents|stages/.*|sizes/.*|files/.*)$"
)


class Tree:
    """A checkout with its interpreter and with caches of its own."""

    def __init__(self, name: str, path: Path, python: str, folder: Path) -> None:
        self.name, self.python, self.folder = name, python, folder / name
        self.outcomes: dict[str, object] = {}
        self.variables = apart(self.folder, PYTHONPATH=str(path), COLUMNS="200")

    def run(self, name: str, *words: object) -> object:
        """Run a command, keep its exit code and its document under a name, return the document."""
        spelled = _older(list(map(str, words))) if self.name == "before" else map(str, words)
        done = subprocess.run(
            [self.python, "-c", MAIN, *spelled], capture_output=True, text=True, check=False,
            cwd=self.folder, env=self.variables, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        document = json.loads(done.stdout) if "--json" in words and done.returncode == 0 else done.stdout
        message = "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1:]
        outcome = {"exit code": done.returncode, "message": message, "document": document}
        self.outcomes[name] = json.loads(json.dumps(outcome).replace(str(self.folder), "FOLDER"))
        sys.stderr.write(f"{self.name:<7} {done.returncode} {name}\n")
        return document


def _older(words: list[str]) -> list[str]:
    """Return a command in the verbs and options of the older tree."""
    match words:
        case ["check", bundle, "--accuracy", *rest]:
            return ["parity", bundle, *rest]
        case ["check", *rest]:
            return ["verify", *rest]
        case ["compare", first, *rest] if first.endswith(".onnx"):
            return ["diff", first, *rest]
        case ["repro", bundle, "--inputs-only", "--output", out, *rest]:
            return ["export-inputs", bundle, "--output-dir", out, *rest]
    names = {"--checkpoint": "--decoder", "--input-dtype": "--input"}
    return [names.get(word, word) for word in words]


def run_all(tree: Tree, media: Path, checkpoints: Path) -> None:
    """Run every verb on every recipe, and one recipe in every precision."""
    tree.run("list", "list", "--json")
    tree.run("doctor", "doctor", "--json")
    for recipe in RECIPES:
        source = checkpoints / recipe
        tree.run(f"inspect {recipe}", "inspect", source, "--json")
        chosen = PRECISIONS if recipe == RECIPES[0] else {"onnxruntime": ((),)}
        for backend, options in ((name, each) for name, cases in chosen.items() for each in cases):
            name = " ".join((recipe, backend, *options))
            words = (source, "--backend", backend, *options)
            tree.run(f"plan {name}", "plan", *words, "--json")
            built = tree.run(f"build {name}", "build", *words, "--json")
            if isinstance(built, dict):
                _use(tree, name, Path(str(built["bundle"])), source, media)
    tree.run("a missing bundle", "check", "nothing-here")
    tree.run("a missing checkpoint", "build", "nothing-here")
    tree.run("an unknown option", "encode", "--nonsense")


def _use(tree: Tree, name: str, bundle: Path, source: Path, folder: Path) -> None:
    out = tree.folder / f"{name.replace(' ', '-')}.safetensors"
    video = () if "kimi" in name else ("--video", folder / "video.npy", "--fps", "2")
    media = ("--image", folder / "image.png", *video)
    tree.run(f"inspect {name}", "inspect", bundle, "--json")
    tree.run(f"check {name}", "check", bundle, "--json")
    tree.run(f"accuracy {name}", "check", bundle, "--accuracy", "--json")
    tree.run(f"encode {name}", "encode", bundle, *media, "--output", out, "--json")
    if out.is_file():
        tree.outcomes[f"embeddings {name}"] = _sums(out)
    question = ("--checkpoint", source, *media, "--prompt", "What is this?", "--max-new-tokens", 8)
    answer = ("run", bundle, *question)
    tree.run(f"run {name}", *answer, "--json")
    tree.run(f"run pruned {name}", *answer, "--prune", "0.5", "--json")
    tree.run(f"compare {name}", "compare", bundle, bundle, "--json")
    tree.run(f"inputs {name}", "repro", bundle, "--inputs-only", "--output", f"{out}.inputs", "--json")
    if name == f"{RECIPES[0]} onnxruntime":
        _share(tree, name, bundle, source, folder)


def _share(tree: Tree, name: str, bundle: Path, source: Path, folder: Path) -> None:
    """Run the verbs that do the same for every bundle."""
    graph, out = bundle / "model.onnx", tree.folder / "shared"
    video = ("--video", folder / "video.npy", "--fps", "2")
    tree.run(f"bench {name}", "bench", bundle, "--rounds", "3", "--size", "56x84", "--json")
    tree.run(f"sweep {name}", "sweep", bundle, "--checkpoint", source, *video, "--rates", "0,0.5", "--json")
    tree.run(f"report {name}", "report", bundle, "--output", f"{out}.html", "--json")
    tree.run(f"graphs {name}", "compare", graph, graph, "--json")
    tree.run(f"repro {name}", "repro", bundle, "--output", f"{out}.zip", "--json")
    tree.run(f"push {name}", "push", bundle, f"{out}.shared", "--json")
    tree.run(f"pull {name}", "pull", f"{out}.shared", "--output-dir", f"{out}.pulled", "--json")
    tree.run("cache prune", "cache", "prune", "--dry-run", "--json")


def _sums(path: Path) -> Mapping[str, object]:
    """Return shape, dtype and a few numbers of every tensor in a file."""
    from safetensors.torch import load_file

    sums = {}
    for name, rows in sorted(load_file(path).items()):
        wide = rows.double()
        sums[name] = [list(rows.shape), str(rows.dtype), wide.sum().item(), wide.abs().max().item()]
    return sums


def differences(old: object, new: object, place: str = "") -> Iterator[str]:
    """Yield every place where two documents differ; numbers may by 1e-5, relatively."""
    # Below the name of the outcome, which may well end with one of these words.
    if VOLATILE.search("/".join(place.split("/")[2:])):
        return
    old, new = (_by_check(document) for document in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            if name not in old or name not in new:
                yield f"{place}/{name}: {'only before' if name in old else 'only now'}"
            else:
                yield from differences(old[name], new[name], f"{place}/{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif isinstance(old, float) and isinstance(new, int | float):
        if abs(old - new) > 1e-5 * max(abs(old), abs(new), 1e-4):
            yield f"{place}: {old!r} before, {new!r} now"
    elif old != new:
        yield f"{place}: {str(old)[:160]!r} before, {str(new)[:160]!r} now"


def _by_check(document: object) -> object:
    """Return rows of an accuracy table by what they check, so that one row more is one difference."""
    if not isinstance(document, list) or not all(
        isinstance(row, dict) and "check" in row for row in document
    ):
        return document
    names = (
        f"{row.get('level', '')} {row['check']} of {row.get('note') or row.get('shapes')}" for row in document
    )
    return dict(zip(names, document, strict=True))


def _write_media(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (90, 130, 3), dtype=np.uint8)).save(folder / "image.png")
    np.save(folder / "video.npy", draw.integers(0, 256, (8, 56, 84, 3), dtype=np.uint8))


def main() -> int:
    taken = {"folder": None, "--old": None, "--old-python": sys.executable}
    options = parser_of("frozen", __doc__, taken).parse_args()
    folder: Path = options.folder
    old, new = (Tree(*tree) for tree in trees(options))
    _write_media(folder / "media")
    kept = folder / "before.json"
    if not kept.is_file():
        for recipe in RECIPES:
            place = folder / f"demo-{recipe}"
            old.run(f"demo {recipe}", "demo", "--recipe", recipe, "--folder", place, "--json")
            (source,) = (path.parent for path in place.rglob("config.json"))
            shutil.copytree(source, folder / "checkpoints" / recipe)
        old.outcomes.clear()
        run_all(old, folder / "media", folder / "checkpoints")
        kept.write_text(json.dumps(old.outcomes, indent=1), encoding="utf-8")
    run_all(new, folder / "media", folder / "checkpoints")
    (folder / "now.json").write_text(json.dumps(new.outcomes, indent=1), encoding="utf-8")
    lines = list(differences(json.loads(kept.read_text(encoding="utf-8")), new.outcomes))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.write(f"{len(lines)} differences in {len(new.outcomes)} outcomes\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
