"""What every level of the gate says about the library as it is on the path: run inside a patched copy.

The line is driven as a user drives it: build, check, open; then the levels one by one, none left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.mutation.gate import block_faults, gate_faults, spoiled
from tests.mutation.identity import identity_faults
from vlexport._export import example_inputs, export
from vlexport.backends import Engine, EngineSpec, Inside, Options, Runner, find_backend, inside_of
from vlexport.checkpoint import Checkpoint
from vlexport.errors import VlexportError
from vlexport.parity.check import Checker
from vlexport.parity.integers import integer_rows
from vlexport.parity.report import Row
from vlexport.parity.subject import Subject
from vlexport.recipe import Limit, Recipe, find_recipe
from vlexport.specs import Precision, TensorSpec

LEVELS = ("identity", "L0", "L1", "L2", "L3", "crash", "reference")
# Caps for the towers of the judge, in half precision: twice the noise that transformers shows on them.
CAPS = {
    "bfloat16": Limit(relative_l2=8e-2, worst_token=0.2, origin="twice the noise of a depth-3 tower"),
    "float16": Limit(relative_l2=1e-2, worst_token=4e-2, origin="twice the noise of a depth-3 tower"),
}
Faults = dict[str, str]
_BREAKS = (VlexportError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Checkpoints of one architecture: two seeds, one with spikes in its residual stream."""

    recipe: str
    plain: Path
    other: Path
    spiky: Path


def judge(trial: Trial, lanes: Sequence[str]) -> Faults:
    """The first fault that each level sees on these parts of the line; empty if the library is right."""
    found: Faults = {}
    recipe = find_recipe(trial.recipe)
    plain, spiky = Checkpoint.open(trial.plain), Checkpoint.open(trial.spiky)
    steps: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "around": lambda: _faults(_around(recipe, plain), "around"),
        "eager": lambda: _structure(recipe, plain, "eager"),
        "spiky": lambda: _structure(recipe, spiky, "eager"),
        "rows": lambda: _structure(recipe, plain, "padded"),
        "bounds": lambda: _structure(recipe, plain, "cu_seqlens"),
        "half": lambda: chain(_half(recipe, plain, "bfloat16"), _half(recipe, spiky, "float16")),
        "gate": lambda: _gate(recipe, plain),
        "onnxruntime": lambda: _translated(recipe, plain, "onnxruntime"),
        "openvino": lambda: _translated(recipe, plain, "openvino"),
        "int8": lambda: _quantised(recipe, plain, "onnxruntime"),
        "identity": lambda: identity_faults(trial.recipe, trial.plain, trial.other),
    }
    for lane in lanes:
        try:
            for level, fault in steps[lane]():
                found.setdefault(level, fault)
        except _BREAKS as error:
            found.setdefault("crash", f"{lane}: {type(error).__name__}: {error}"[:200])
    return found


def _around(recipe: Recipe[Any], checkpoint: Checkpoint) -> list[Row]:
    """L0 without an engine."""
    subject = _subject(recipe, checkpoint, "float32", "eager")
    return integer_rows(subject, 0)


def _structure(recipe: Recipe[Any], checkpoint: Checkpoint, way: str) -> Iterator[tuple[str, str]]:
    """L1, L3 and what L0 asks of an engine, on the tower in torch; in other forms, their tables too."""
    subject = _subject(recipe, checkpoint, "float32", "eager")
    if way != "eager":
        subject = replace(subject, form=way)
        yield from _faults(integer_rows(subject, 0), way)
    with in_torch(subject) as engine:
        yield from _climbed(Checker(engine, subject, _silent), way)


def _gate(recipe: Recipe[Any], checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """The gate itself, on a right tower and on a wrong one."""
    subject = _subject(recipe, checkpoint, "float32", "eager")
    with in_torch(subject) as engine:
        yield from gate_faults(subject, engine)
    with in_torch(wrong := spoiled(subject)) as engine:
        yield from block_faults(wrong, engine)


def _translated(recipe: Recipe[Any], checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, str]]:
    """The same through a backend, with tables of its form and the stored files."""
    subject = _subject(recipe, checkpoint, "float32", name)
    if subject.form == "rows":
        yield from _faults(integer_rows(subject, 0), name)
    with _built(subject, name) as (engine, inside):
        yield from _climbed(Checker(engine, subject, _silent, inside), name)


def _quantised(recipe: Recipe[Any], checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, str]]:
    """L2 and L3 of integers, through a backend: torch has no form of them."""
    able = next(each for each in find_backend(name).capabilities if each.quantisation)
    subject = _subject(recipe, checkpoint, able.dtype, name)
    subject = replace(subject, precision=replace(subject.precision, quantisation=able.quantisation))
    with _built(subject, name) as (engine, inside):
        climb = Checker(engine, subject, _silent, inside)
        climb.ask()
        yield from _faults([*climb.engine_integers(), *climb.dtype(), *climb.health()], "int8")


@contextmanager
def _built(subject: Subject, name: str) -> Iterator[tuple[Engine, Inside]]:
    backend, options = find_backend(name), Options(threads=1)
    graph = export(subject.recipe, subject.checkpoint, form=subject.form, quantisation=subject.quantisation)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    with tempfile.TemporaryDirectory() as folder:
        backend.build(graph, options, Path(folder))
        files = _Files(Path(folder))
        with Engine(backend.open(files, spec, options), spec) as engine:
            yield engine, inside_of(backend, files)


def _climbed(climb: Checker, where: str) -> Iterator[tuple[str, str]]:
    yield from _faults([*climb.engine_integers(), *climb.structure(), *climb.health()], where)


def _half(recipe: Recipe[Any], checkpoint: Checkpoint, dtype: str) -> Iterator[tuple[str, str]]:
    """L2 and L3 of the tower in a smaller dtype, in torch."""
    limited = replace(recipe, limits={**recipe.limits, dtype: recipe.limits.get(dtype) or CAPS[dtype]})
    subject = _subject(limited, checkpoint, dtype, "eager")
    with in_torch(subject) as engine:
        climb = Checker(engine, subject, _silent)
        climb.ask()
        rows = [*climb.engine_integers(), *climb.dtype(), *climb.health()]
    yield from _faults(rows, dtype)


def _subject(recipe: Recipe[Any], checkpoint: Checkpoint, dtype: str, backend: str) -> Subject:
    config = recipe.read_config(checkpoint)
    form = find_backend(backend).form
    torch.manual_seed(0)
    return Subject(
        recipe=recipe,
        config=config,
        checkpoint=checkpoint,
        form=form,
        precision=Precision(dtype=dtype),
        profile=next(iter(recipe.profiles(config).values())),
        tensors=recipe.stored_tensors(checkpoint, config),
    )


def in_torch(subject: Subject) -> Engine:
    """The tower as it is, not traced, behind the checks of an engine."""
    recipe, config, form = subject.recipe, subject.config, subject.form
    tower = recipe.tower(subject.checkpoint, subject.dtype)
    inputs = example_inputs(recipe, config, subject.dtype, form)
    with torch.inference_mode():
        outputs = tower(inputs)
    axes = recipe.axes(config, form)
    given, made = (
        tuple(
            TensorSpec(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(axes.get(name, {}).get(axis, size) for axis, size in enumerate(tensor.shape)),
            )
            for name, tensor in tensors.items()
        )
        for tensors in (inputs, outputs)
    )
    profile = next(iter(recipe.profiles(config).values()))
    return Engine(_InTorch(tower), EngineSpec(inputs=given, outputs=made, profile=profile))


def _faults(rows: list[Row], where: str) -> Iterator[tuple[str, str]]:
    for row in rows:
        if row.verdict in ("failed", "blocked"):
            over = ", ".join(f"{name} {value:.2g}" for name, value in row.exceeded().items())
            yield row.level, f"{where}: {row.check}, {row.shapes}: {row.note or over}"[:200]


class _Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()


class _InTorch(Runner):
    """A tower as it is, behind the checks of an engine."""

    def __init__(self, tower: nn.Module) -> None:
        self._tower = tower

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            outputs: dict[str, Tensor] = self._tower(dict(tensors))
        return outputs


def _silent(phase: str, share: float) -> None:
    """Nobody watches."""
