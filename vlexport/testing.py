"""Checks for authors of recipes and backends, on one checkpoint.

from vlexport.testing import check_backend, check_recipe

report = check_recipe("mine.py", "path/to/a/tiny/checkpoint")
assert report.passed, report.table()
report = check_backend("my_backend.py", "path/to/a/tiny/checkpoint")
assert report.passed, report.table()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vlexport._build.export import example_inputs, specs_of, trace
from vlexport._build.request import request
from vlexport._build.spec import BuildSpec
from vlexport.backends import (
    Backend,
    Engine,
    EngineSpec,
    Folder,
    FunctionRunner,
    Options,
    find_backend,
    inside_of,
    runs_here,
)
from vlexport.checkpoint import Checkpoint
from vlexport.codec import canonical, encode, parse
from vlexport.errors import BundleError
from vlexport.parity.check import Checker, run_checks
from vlexport.parity.inputs_exact import fault_rows, guarded
from vlexport.parity.report import ParityReport, Row
from vlexport.parity.samples import SampleRules, blank, symbol_values
from vlexport.parity.tables import Faults
from vlexport.recipe import Recipe, find_recipe
from vlexport.specs import Precision, ShapeProfile, check_within
from vlexport.system import ONE_BUILD
from vlexport.vision.attention.layout import LAYOUTS

ORIGIN = "what docs/recipes.md requires of a recipe"
ORIGIN_OF_BACKENDS = "what docs/backends.md requires of a backend"


def check_recipe(recipe: Recipe[Any] | str | Path, checkpoint: Checkpoint | str | Path) -> ParityReport:
    """Return the report of a recipe, or of a recipe's file, on one checkpoint.

    Everything runs in torch, float32, in every attention layout: config, names and bytes of weights, tables,
    axes, profiles and token counts of the recipe's own mixes, and the tower against the recipe's reference.
    """
    chosen = recipe if isinstance(recipe, Recipe) else find_recipe(str(recipe))
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(str(checkpoint))
    rows: list[Row] = []
    checks: dict[str, Callable[[], Faults]] = {
        "model type": lambda: _model_type(chosen, opened),
        "config": lambda: _config(chosen, opened),
        "weight names": lambda: _weight_names(chosen, opened),
    }
    for name, check in checks.items():
        rows += fault_rows(guarded(name, check), ORIGIN)
    if any(row.verdict == "failed" for row in rows):
        return ParityReport(rows=tuple(rows))
    config = chosen.read_config(opened)
    for layout in LAYOUTS:
        subject = BuildSpec(
            recipe=chosen,
            config=config,
            checkpoint=opened,
            form=layout,
            precision=Precision(dtype="float32"),
            profile=next(iter(chosen.profiles(config).values())),
            tensors=chosen.stored_tensors(opened, config),
        )
        faults = guarded("tower", partial(_runs, subject))
        layout_rows = fault_rows(faults, ORIGIN)
        if not any(faults.values()):
            with in_torch(subject) as engine:
                faults = guarded("shapes", partial(_shapes, subject, Checker(engine, subject).rules))
                layout_rows += fault_rows(faults, ORIGIN)
                layout_rows += run_checks(engine, subject, stop=False).rows
        rows += [replace(row, check=f"{layout}: {row.check}") for row in layout_rows]
    return ParityReport(rows=tuple(rows))


def check_backend(backend: str | Path, checkpoint: Checkpoint | str | Path | None = None) -> ParityReport:
    """Return the report of a backend, by name or file, on one checkpoint, by default the demo's.

    Its target is read back, files that mean nothing are refused, and an engine that it builds and opens is
    held to the recipe's reference, in every precision that this machine runs.
    """
    chosen = find_backend(str(backend))
    target = chosen.target()
    same = type(target).parse(target.tag) == target
    faults = {"target": "" if same else f"{target.tag} is read back as another", **_refusal(chosen)}
    rows = fault_rows(faults, ORIGIN_OF_BACKENDS)
    with TemporaryDirectory() as folder:
        source = checkpoint or _demo_checkpoint(Path(folder, "checkpoint"))
        for capability in chosen.capabilities:
            if runs_here(chosen, capability.precision):
                into, scheme = Path(folder, capability.spelled), capability.quantisation
                into.mkdir()
                quantize = scheme.name if scheme else None
                subject = request(source, backend=chosen.name, dtype=capability.dtype, quantize=quantize)
                built = _engine_rows(chosen, subject, into)
                rows += [replace(row, check=f"{capability.spelled}: {row.check}") for row in built]
    return ParityReport(rows=tuple(rows))


def _refusal(backend: Backend) -> Faults:
    spec = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {}))
    fault = "files that mean nothing are opened"
    try:
        backend.open(_Meaningless(), spec, Options()).close()
    except BundleError:
        fault = ""
    except Exception as error:  # noqa: BLE001  a library's own error is the fault
        fault = f"{type(error).__name__} raised, BundleError expected: load within `refused_by`"
    return {"damaged files": fault}


class _Meaningless:
    """Files that are intact by their hashes and mean nothing."""

    def read(self, name: str) -> bytes:
        return b"[1, {}]"

    def map(self, name: str) -> memoryview:
        return memoryview(self.read(name))


def _engine_rows(backend: Backend, subject: BuildSpec, folder: Path) -> Sequence[Row]:
    files = Folder(folder)
    with ONE_BUILD:
        graph = trace(subject)
        backend.build(graph, subject.options, folder)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    with Engine(backend.open(files, spec, subject.options), spec) as engine:
        return run_checks(engine, subject, inside=inside_of(backend, files), stop=False).rows


def _demo_checkpoint(folder: Path) -> Path:
    from vlexport.recipes import demo
    from vlexport.recipes.demo.writing import write_checkpoint

    contents = importlib.import_module(f"{demo.__name__}.{demo.DEFAULT_RECIPE}").contents()
    path: Path = write_checkpoint(folder, contents, seed=0)
    return path


def _model_type(recipe: Recipe[Any], checkpoint: Checkpoint) -> Faults:
    served = checkpoint.model_type in recipe.model_types
    return {"model type": "" if served else f"{checkpoint.model_type} is none of {recipe.model_types}"}


def _config(recipe: Recipe[Any], checkpoint: Checkpoint) -> Faults:
    config = recipe.read_config(checkpoint)
    # Settings that are kept as they came have tuples where those of files have lists.
    written = canonical(encode(config))
    same = canonical(encode(recipe.parse_config(parse(written)))) == written
    return {"config": "" if same else "what was written is read back as another config"}


def _weight_names(recipe: Recipe[Any], checkpoint: Checkpoint) -> Faults:
    """Name a stored tensor of the right shape for every tensor of the tower, and each stored one once."""
    config = recipe.read_config(checkpoint)
    shapes = {name: tuple(tensor.shape) for name, tensor in recipe.outline(config).state_dict().items()}
    names = recipe.weight_names(checkpoint, config)
    wrong = sorted(set(shapes) ^ set(names))
    wrong += [
        name for name in set(shapes) & set(names) if checkpoint.stored(names[name]).shape != shapes[name]
    ]
    twice = len(names) - len(set(names.values()))
    fault = f"{wrong[0]} has no stored tensor of its shape" if wrong else ""
    return {"weight names": fault or (f"{twice} stored tensors have two names" if twice else "")}


def _runs(subject: BuildSpec) -> Faults:
    in_torch(subject).close()
    return {"tower": ""}


def _shapes(subject: BuildSpec, rules: SampleRules) -> Faults:
    for mix in subject.recipe.shape_sets(subject.config).values():
        items = [blank(subject.recipe, subject.config, kind, grid) for kind, grid in mix]
        check_within(rules.profile, symbol_values(subject.recipe, subject.config, items, rules))
    return {"shapes": ""}


def in_torch(subject: BuildSpec) -> Engine:
    """Return the tower as it is, not traced, as an engine of the recipe's first profile."""
    recipe, config, layout = subject.recipe, subject.config, subject.form
    tower = subject.tower()
    inputs = example_inputs(recipe, config, subject.dtype, layout)
    with torch.inference_mode():
        outputs = tower(inputs)
    axes = recipe.axes(config, layout)
    profile = next(iter(recipe.profiles(config).values()))
    spec = EngineSpec(inputs=specs_of(inputs, axes), outputs=specs_of(outputs, axes), profile=profile)
    return Engine(FunctionRunner(tower), spec)
