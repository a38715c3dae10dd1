"""Planted bugs as data (`bugs/*.txt`), and a copy of the library that holds one.

A bug is a line `name | kind | file`, the text that it replaces (`-`) and the new one (`+`). `file` is
relative to the package; `recipe.py` is the recipe that has the trial, `./recipe.py`
the contract. Further fields of the line:
trial     the tiny checkpoint that shows the bug, one of `TRIALS` in trials.py (default: windows)
lanes     the parts of the gate to run, where those of the file are not the ones that show it
tests     files below tests/ (or `file::name`) to run before those of the file, and before any lane not named
harmless  why a patch changes no result
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vlexport.errors import InputError

FOLDER = Path(__file__).parent / "bugs"
# Kinds of which none may survive.
NEVER_SURVIVE = ("windows", "positions", "masks", "types")
RECIPE = "recipe.py"
LANES = (
    "eager",
    "spiky",
    "half",
    "padded",
    "cu_seqlens",
    "bytes",
    "gate",
    "onnxruntime",
    "portable",
    "openvino",
    "int8",
    "identity",
    "packages",
)
# Lanes by the beginning of the file's name; what no engine contains is judged by tests alone.
LANES_OF = {
    "vision/attention/padded.py": ("padded",),
    "vision/attention/cu_seqlens.py": ("cu_seqlens",),
    "vision/attention/kernels.py": ("eager", "spiky", "half", "cu_seqlens"),
    "vision/attention/layout.py": ("eager", "spiky", "half", "padded", "cu_seqlens"),
    "vision/preprocess.py": (),
    "vision/": ("eager", "spiky", "half"),
    RECIPE: ("eager", "spiky", "half"),
    **dict.fromkeys(("checkpoint/adapter.py", "checkpoint/quantized.py"), ()),
    "onnx/quantize.py": ("int8",),
    "onnx/portable.py": ("portable",),
    "onnx/": ("onnxruntime",),
    "runtime/opening.py": ("identity",),
    **dict.fromkeys(("pruning/", "positions/", "integrations/", "runtime/", "parity/graphs.py"), ()),
    "_build/token_graphs.py": ("packages",),
    "": ("eager", "identity"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """One piece of text replaced by another; without a file, the library as it is."""

    name: str
    kind: str = "none"
    file: str = ""
    old: str = ""
    new: str = ""
    trial: str = "windows"
    lanes: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    harmless: str = ""

    @classmethod
    def parse(cls, text: str) -> Bug:
        head, *lines = text.strip("\n").split("\n")
        name, kind, file, *further = head.split(" | ")
        fields = dict(each.split("=", 1) for each in further)
        named = {key: tuple(fields.pop(key, "").split(",")) for key in ("lanes", "tests")}
        lanes, tests = (tuple(filter(None, named[key])) for key in ("lanes", "tests"))
        if not lanes and not tests:
            lanes = next(LANES_OF[each] for each in LANES_OF if file.startswith(each))
        old, new = ("\n".join(each[1:] for each in lines if each[0] == sign) for sign in "-+")
        return cls(name=name, kind=kind, file=file, old=old, new=new, lanes=lanes, tests=tests, **fields)

    def planted(self, source: str) -> str:
        """Return the source with the bug; its place has to be there exactly once."""
        if (found := source.count(self.old)) != 1:
            raise InputError(
                f"bug '{self.name}': its place is {found} times in {self.file}, once expected. "
                "The code has moved on: point the bug at the new text."
            )
        return source.replace(self.old, self.new)

    def path(self, package: Path, recipes: Path, recipe: str) -> Path:
        return recipes / f"{recipe}.py" if self.file == RECIPE else package / self.file


@cache
def all_bugs() -> tuple[Bug, ...]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))]
    return tuple(Bug.parse(part) for text in texts for part in text.strip("\n").split("\n\n"))


def find_bug(name: str) -> Bug:
    known = {bug.name: bug for bug in all_bugs()}
    if name not in known:
        raise InputError(f"no bug '{name}'. Known: {', '.join(sorted(known))}.")
    return known[name]


def no_bug(trial: str, lanes: Collection[str] = ()) -> Bug:
    """Return what stands for the right library, judged by these parts of the gate."""
    return Bug(name=f"no bug, {trial}", trial=trial, lanes=tuple(lane for lane in LANES if lane in lanes))


def plant(bug: Bug, package: Path, recipes: Path, recipe: str, into: Path) -> Path:
    """Copy package and recipes below `into`, patch the copy, and return the folder to put on the path.

    Compiled files of sources that keep their time stay valid.
    """
    copy = into / "vlexport"
    shutil.copytree(package, copy)
    if not (copy / "recipes").exists():
        shutil.copytree(recipes, copy / "recipes")
    if bug.file:
        path = bug.path(copy, copy / "recipes", recipe)
        path.write_text(bug.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
    return into
