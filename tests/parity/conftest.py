"""Small towers on disk, and the gate's view of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import subjects
from tests.changed_recipes import with_tower
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.parity.check import run_checks
from vlexport.recipe import find_recipe
from vlexport.testing import in_torch


@pytest.fixture(scope="session")
def towers(tmp_path_factory):
    """Checkpoints by depth and seed, each written once."""
    known = {}

    def checkpoint(depth=2, seed=0):
        if (depth, seed) not in known:
            folder = tmp_path_factory.mktemp("tower") / "checkpoint"
            known[depth, seed] = Checkpoint.open(write_tiny_qwen2_5_vl(folder, depth=depth, seed=seed))
        return known[depth, seed]

    return checkpoint


@pytest.fixture(scope="session")
def subject_of(towers):
    """What the gate is given about a tower; `change` alters the tower after its weights are loaded."""

    def subject(depth=2, seed=0, dtype="float32", change=None, **others):
        checkpoint = towers(depth, seed)
        recipe = find_recipe("qwen2_5_vl")
        recipe = replace(with_tower(recipe, change) if change else recipe, **others)
        return subjects.subject_of(checkpoint, dtype, recipe=recipe)

    return subject


@pytest.fixture(scope="session")
def climb():
    """Run the whole check on a tower in torch."""

    def report(subject, **options):
        with in_torch(subject) as engine:
            return run_checks(engine, subject, **options)

    return report
