"""The gate of the library that is on the path, level by level, none left out: run inside a patched copy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tests.changed_recipes import with_few_mixes, with_tower
from tests.mutation.identity import identity_faults
from tests.subjects import opened_engine, subject_of
from vlexport._build.export import export
from vlexport._build.spec import BuildSpec
from vlexport._build.token_graphs import open_graphs, planned_graphs, write_graphs
from vlexport.backends import Engine, Folder, FunctionRunner, find_backend
from vlexport.backends.onnxruntime import BACKEND
from vlexport.checkpoint import Checkpoint
from vlexport.errors import VlexportError
from vlexport.parity.blocks import stage_name
from vlexport.parity.check import Checker
from vlexport.parity.graphs import graph_rows
from vlexport.parity.inputs_exact import call_rows, portable_row
from vlexport.parity.report import ParityReport, Row
from vlexport.recipe import Limit, Recipe, find_recipe
from vlexport.specs import Range, ShapeProfile, TensorSpec
from vlexport.testing import in_torch

LEVELS = ("identity", "L0", "L1", "L2", "L3", "crash", "tests")
# Caps for the towers of the judge, in half precision: twice the noise that transformers shows on them.
CAPS = {
    "bfloat16": Limit(relative_l2=8e-2, worst_token=0.2, origin="twice the noise of a depth-3 tower"),
    "float16": Limit(relative_l2=1e-2, worst_token=4e-2, origin="twice the noise of a depth-3 tower"),
}
# Tables that no recipe has, one of them named as buckets are.
STRANGE = ("strange", "strange_cells_a")
# A fault of one block, and a limit of tokens that the noise of any reference is above.
FACTOR, NARROW = 1.01, 1e-12
BREAKS = (VlexportError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


Found = Iterator[tuple[str, str]]


def judge(recipe_name: str, folder: Path, lanes: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the first of these parts of the gate that sees a fault, and the first one of each level there.

    `folder` holds checkpoints of one architecture: two seeds, and one with spikes in its residual stream.
    """
    recipe = find_recipe(recipe_name)
    plain, spiky = Checkpoint.open(folder / "plain"), Checkpoint.open(folder / "spiky")
    steps: dict[str, Callable[[], Found]] = {
        "eager": lambda: _structure(recipe, plain, "grouped"),
        "spiky": lambda: _structure(recipe, spiky, "grouped"),
        "padded": lambda: _structure(recipe, plain, "padded"),
        "cu_seqlens": lambda: _structure(recipe, plain, "cu_seqlens"),
        "bytes": lambda: _structure(recipe, plain, "grouped", "uint8"),
        "half": lambda: chain(
            _half(recipe, plain, "bfloat16"),
            _half(recipe, spiky, "float16") if "float16" in recipe.limits else (),
        ),
        "gate": lambda: _gate(recipe, plain),
        "onnxruntime": lambda: _translated(recipe, plain, "onnxruntime"),
        "portable": lambda: _portable(recipe, plain),
        "openvino": lambda: _translated(recipe, plain, "openvino"),
        "int8": lambda: _quantised(recipe, plain, "onnxruntime"),
        "identity": lambda: identity_faults(recipe_name, folder),
        "packages": _packages,
    }
    for lane in lanes:
        found: dict[str, str] = {}
        try:
            for level, fault in steps[lane]():
                found.setdefault(level, fault)
        except BREAKS as error:
            found["crash"] = f"{type(error).__name__}: {error}"[:200]
        if found:
            return lane, found
    return "", {}


def _structure(
    recipe: Recipe[Any], checkpoint: Checkpoint, layout: str, input_dtype: str = "float32"
) -> Found:
    """Yield faults of L0, L1 and L3 on the tower in torch, in any layout."""
    subject = replace(_subject(recipe, checkpoint, "float32", "eager", input_dtype), form=layout)
    with in_torch(subject) as engine:
        yield from _climbed(Checker(engine, subject, silent), layout)


def _gate(recipe: Recipe[Any], checkpoint: Checkpoint) -> Found:
    """Yield what the gate itself would let pass: nothing to compare, unnamed tables, a wrong block."""
    subject = _subject(recipe, checkpoint, "float32", "eager")
    with in_torch(subject) as engine:
        profile = ShapeProfile("odd", {symbol: Range(5, 5, 5) for symbol in engine.spec.profile.ranges})
        checker = Checker(
            Engine(FunctionRunner(lambda _: {}), replace(engine.spec, profile=profile)), subject, silent
        )
        rows = (*checker.integers(), *checker.structure())
        if ParityReport(rows=rows, required=()).status == "passed":
            yield "L1", "nothing was compared, and passed"
        checker = Checker(engine, subject, silent)
        strange = tuple(TensorSpec(name=name, dtype="int32", shape=(1,)) for name in STRANGE)
        found = call_rows(subject, checker.samples[:1], replace(checker.rules, inputs=strange))
        named = {row.check for row in found if row.verdict == "observed"}
        yield from (("L0", f"table {name} is not checked, and not named") for name in {*STRANGE} - named)
    with in_torch(wrong := _spoiled(subject)) as engine:
        small = replace(wrong, recipe=with_few_mixes(wrong.recipe, wrong.config))
        failed = {row.check for row in Checker(engine, small, silent).structure() if row.verdict == "failed"}
        tower: Any = wrong.tower()
        if (last := stage_name(len(tower.blocks) - 1)) not in failed:
            yield "L1", f"{last} is wrong behind a widened limit, and not named"


def _spoiled(subject: BuildSpec) -> BuildSpec:
    """Return a subject with a wrong last block; one of its limits is so narrow that noise widens it."""
    limit = subject.structure_limit
    assert limit is not None

    def change(module: Any) -> None:
        next(each for each in module.blocks[-1].parameters() if each.ndim > 1).data.mul_(FACTOR)

    narrow = replace(limit, relative_l2=1.0, worst_token=NARROW)
    wrong = replace(with_tower(subject.recipe, change), limits={"float32": narrow})
    return replace(subject, recipe=wrong)


def _translated(recipe: Recipe[Any], checkpoint: Checkpoint, name: str) -> Found:
    """The same through a backend, with the stored files."""
    subject = _subject(recipe, checkpoint, "float32", name)
    with opened_engine(replace(subject, backend=find_backend(name))) as (engine, inside):
        yield from _climbed(Checker(engine, subject, silent, inside), name)


def _portable(recipe: Recipe[Any], checkpoint: Checkpoint) -> Found:
    """Yield faults of the graphs around an engine."""
    subject = _subject(recipe, checkpoint, "float32", "onnxruntime")
    rule = recipe.pruning_rule
    with tempfile.TemporaryDirectory() as folder, in_torch(subject) as engine:
        BACKEND.write_portable(export(recipe, checkpoint), rule, Path(folder))
        portable = BACKEND.portable(Folder(Path(folder)), rule)
        yield from _faults([portable_row(portable, subject, Checker(engine, subject, silent).samples)], "")


def _quantised(recipe: Recipe[Any], checkpoint: Checkpoint, name: str) -> Found:
    """L2 and L3 of integers, through a backend: torch has no form of them."""
    able = next(each for each in find_backend(name).capabilities if each.quantisation)
    subject = _subject(recipe, checkpoint, able.dtype, name)
    subject = replace(subject, precision=replace(subject.precision, quantisation=able.quantisation))
    with opened_engine(replace(subject, backend=find_backend(name))) as (engine, inside):
        climb = Checker(engine, subject, silent, inside)
        climb.run_samples()
        yield from _faults([*climb.integers(), *climb.dtype(), *climb.health()], "int8")


def _packages() -> Found:
    """Yield faults of packages, which are compiled anew where sources differ, beside their eager form."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bundle"
        folder.mkdir()
        identity = write_graphs(planned_graphs("evs", "cpu"), folder, "float32")
        graphs = open_graphs(identity, Folder(folder), "float32")
        yield from _faults(list(graph_rows(graphs, "float32")), graphs.form)


def _climbed(climb: Checker, where: str) -> Found:
    yield from _faults([*climb.integers(), *climb.structure(), *climb.health()], where)


def _half(recipe: Recipe[Any], checkpoint: Checkpoint, dtype: str) -> Found:
    """L2 and L3 of the tower in a smaller dtype, in torch."""
    limited = replace(recipe, limits={**recipe.limits, dtype: recipe.limits.get(dtype) or CAPS[dtype]})
    subject = _subject(limited, checkpoint, dtype, "eager")
    with in_torch(subject) as engine:
        climb = Checker(engine, subject, silent)
        climb.run_samples()
        rows = [*climb.integers(), *climb.dtype(), *climb.health()]
    yield from _faults(rows, dtype)


def _subject(
    recipe: Recipe[Any], checkpoint: Checkpoint, dtype: str, backend: str, input_dtype: str = "float32"
) -> BuildSpec:
    torch.manual_seed(0)
    return subject_of(checkpoint, dtype, find_backend(backend).form, recipe, input_dtype=input_dtype)


def _faults(rows: list[Row], where: str) -> Found:
    for row in rows:
        if row.verdict in ("failed", "blocked"):
            over = ", ".join(f"{name} {value:.2g}" for name, value in row.exceeded().items())
            yield row.level, f"{where}: {row.check}, {row.shapes}: {row.note or over}"[:200]


def silent(phase: str, share: float) -> None:
    """Drop progress."""
