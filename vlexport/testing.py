"""Checks for authors of recipes: what a recipe reads, prepares, declares and computes, on one checkpoint.

from vlexport.testing import check_recipe

report = check_recipe("mine.py", "path/to/a/tiny/checkpoint")
assert report.passed, report.table()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vlexport._build.export import example_inputs, specs_of
from vlexport._build.spec import BuildSpec
from vlexport.backends import Engine, EngineSpec, FunctionRunner
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.parity.check import Checker, run_checks
from vlexport.parity.inputs_exact import guarded
from vlexport.parity.report import ParityReport, Row, exact_row
from vlexport.parity.samples import SampleRules, symbol_values
from vlexport.parity.tables import Faults
from vlexport.recipe import Recipe, find_recipe
from vlexport.specs import Precision, check_within
from vlexport.vision.attention.layout import LAYOUTS

ORIGIN = "what docs/recipes.md requires of a recipe"


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
        rows += [exact_row(*fault, ORIGIN) for fault in _listed(guarded(name, check))]
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
        layout_rows = [exact_row(*fault, ORIGIN) for fault in _listed(faults)]
        if not any(faults.values()):
            with in_torch(subject) as engine:
                faults = guarded("shapes", partial(_shapes, subject, Checker(engine, subject).rules))
                layout_rows += [exact_row(*fault, ORIGIN) for fault in _listed(faults)]
                layout_rows += run_checks(engine, subject, stop=False).rows
        rows += [replace(row, check=f"{layout}: {row.check}") for row in layout_rows]
    return ParityReport(rows=tuple(rows))


def _listed(faults: Faults) -> Iterator[tuple[str, list[str]]]:
    for name, fault in faults.items():
        yield name, [fault] if fault else []


def _model_type(recipe: Recipe[Any], checkpoint: Checkpoint) -> Faults:
    served = checkpoint.model_type in recipe.model_types
    return {"model type": "" if served else f"{checkpoint.model_type} is none of {recipe.model_types}"}


def _config(recipe: Recipe[Any], checkpoint: Checkpoint) -> Faults:
    config = recipe.read_config(checkpoint)
    same = recipe.parse_config(json.loads(json.dumps(encode(config)))) == config
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
        check_within(rules.profile, symbol_values(subject.recipe, subject.config, mix, rules))
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
