"""What every level of the gate says about the library as it is on the path: run inside a patched copy.

The line is driven as a user drives it: build, check, open; then the levels one by one, none left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.backends import Engine, EngineSpec, Options, find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.errors import VlexportError
from vlexport.export import export
from vlexport.parity.check import Climb
from vlexport.parity.mutants.identity import identity_faults
from vlexport.parity.report import Row
from vlexport.parity.subject import Subject
from vlexport.recipe import Limit, Recipe, find_recipe

LEVELS = ("identity", "L0", "L1", "L2", "L3", "crash")
BACKENDS = ("eager", "onnxruntime")
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


def judge(trial: Trial) -> Faults:
    """The first fault that each level sees; empty if the library is right."""
    found: Faults = {}
    recipe = find_recipe(trial.recipe)
    plain, spiky = Checkpoint.open(trial.plain), Checkpoint.open(trial.spiky)
    steps: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
        lambda: _structure(recipe, plain, BACKENDS),
        lambda: _structure(recipe, spiky, BACKENDS[:1]),
        lambda: _half(recipe, plain, "bfloat16"),
        lambda: _half(recipe, spiky, "float16"),
        lambda: identity_faults(trial.recipe, trial.plain, trial.other),
    )
    for step in steps:
        try:
            for level, fault in step():
                found.setdefault(level, fault)
        except _BREAKS as error:
            found.setdefault("crash", f"{type(error).__name__}: {error}"[:200])
    return found


def _structure(
    recipe: Recipe[Any], checkpoint: Checkpoint, backends: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """L0, L1 and L3 in float32, through every backend."""
    config = recipe.read_config(checkpoint)
    torch.manual_seed(0)
    graph = export(recipe, checkpoint)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    known = Subject(recipe=recipe, config=config, checkpoint=checkpoint, form=graph.form, dtype="float32")
    for name in backends:
        backend = find_backend(name)
        subject = replace(known, form=backend.form, backend=backend)
        with tempfile.TemporaryDirectory() as folder:
            backend.build(graph, Options(threads=1), Path(folder))
            with Engine(backend.open(_Files(Path(folder)), spec, Options(threads=1)), spec) as engine:
                climb = Climb(engine, subject, _silent)
                rows = [*climb.structure(), *climb.health()]
                rows += climb.integers() if name == backends[0] else []
        yield from _faults(rows, name)


def _half(recipe: Recipe[Any], checkpoint: Checkpoint, dtype: str) -> Iterator[tuple[str, str]]:
    """L2 and L3 of the tower in a smaller dtype, in torch."""
    limited = replace(recipe, limits={**recipe.limits, dtype: recipe.limits.get(dtype) or CAPS[dtype]})
    config = limited.read_config(checkpoint)
    form = find_backend(BACKENDS[0]).form
    graph = export(recipe, checkpoint, dtype=dtype)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    tower = limited.tower(checkpoint, dtype, form)
    subject = Subject(recipe=limited, config=config, checkpoint=checkpoint, form=form, dtype=dtype)
    with Engine(_InTorch(tower), spec) as engine:
        climb = Climb(engine, subject, _silent)
        climb.ask()
        rows = [*climb.dtype(), *climb.health()]
    yield from _faults(rows, dtype)


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


class _InTorch:
    """A tower as it is, behind the checks of an engine."""

    def __init__(self, tower: nn.Module) -> None:
        self._tower = tower

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            outputs: dict[str, Tensor] = self._tower(dict(tensors))
        return outputs

    def close(self) -> None:
        return


def _silent(phase: str, share: float) -> None:
    """Nobody watches."""
