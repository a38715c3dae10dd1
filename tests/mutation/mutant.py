"""A planted bug, and a copy of the library that holds it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlexport.errors import InputError

# Kinds of which none may survive.
NEVER_SURVIVE = ("windows", "positions", "masks", "types")
# The recipe whose demo has the trial.
RECIPE = "recipe.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One piece of text replaced by another; `file` is relative to the package, `recipe.py` is the recipe.

    trial     which tiny checkpoint shows it, one of the `TRIALS` of a recipe's demo
    harmless  why a survivor changes no result; empty for bugs
    lanes     the parts of the line to judge, where those of its file are not the ones that show it
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    trial: str = "windows"
    harmless: str = ""
    lanes: tuple[str, ...] = ()

    @property
    def planted(self) -> bool:
        """False for what stands for the library as it is."""
        return bool(self.file)


def no_bug(trial: str) -> Mutant:
    """Judged beside the bugs, to see that the gate does not cry wolf."""
    return Mutant(name=f"no bug, {trial}", kind="none", file="", old="", new="", trial=trial)


LANES = (
    "around",
    "eager",
    "spiky",
    "half",
    "rows",
    "bounds",
    "gate",
    "onnxruntime",
    "openvino",
    "int8",
    "identity",
)
# Lanes of files that serve some attention layouts only.
LAYOUT_OF = {
    "vision/attention/padded.py": ("rows",),
    "vision/attention/cu_seqlens.py": ("bounds",),
    "vision/attention/layout.py": ("around", "eager", "spiky", "half", "rows", "bounds"),
}
# Packages of what happens around an engine.
AROUND = ("pruning/", "positions/", "integrations/", "runtime/")
# Files of which only pixels and weights follow, no arithmetic of a tower.
BESIDE = ("vision/preprocess.py",)


def lanes(mutant: Mutant) -> tuple[str, ...]:
    """The parts of the line that a patch of this file can reach; the others would only repeat themselves."""
    if mutant.lanes:
        return mutant.lanes
    if mutant.file.startswith(AROUND) or mutant.file in BESIDE:
        return ("around",)
    if mutant.file == "onnx/quantize.py":
        return ("int8",)
    if mutant.file.startswith("onnx/"):
        return ("onnxruntime",)
    if mutant.file in LAYOUT_OF:
        return LAYOUT_OF[mutant.file]
    if mutant.file.startswith("vision/") or mutant.file == RECIPE:
        return ("around", "eager", "spiky", "half")
    return ("around", "eager", "identity")


def plant(mutants: Sequence[Mutant], package: Path, recipes: Path, recipe: str, into: Path) -> Path:
    """Copy package and recipes below `into` and patch the copy; the folder to put first on the path."""
    ignored = shutil.ignore_patterns("__pycache__")
    copy = into / "vlexport"
    shutil.copytree(package, copy, ignore=ignored)
    if not (copy / "recipes").exists():
        shutil.copytree(recipes, copy / "recipes", ignore=ignored)
    for mutant in mutants:
        path = copy / (f"recipes/{recipe}.py" if mutant.file == RECIPE else mutant.file)
        path.write_text(patched(mutant, path.read_text(encoding="utf-8")), encoding="utf-8")
    return into


def patched(mutant: Mutant, source: str) -> str:
    """The source with the bug; the place has to be there exactly once."""
    found = source.count(mutant.old)
    if found != 1:
        raise InputError(
            f"mutant '{mutant.name}': its place is {found} times in {mutant.file}, once expected. "
            "The code has moved on: point the mutant at the new text."
        )
    return source.replace(mutant.old, mutant.new)
