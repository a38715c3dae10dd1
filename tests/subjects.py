"""What the gate is given about a tower, from its recipe and checkpoint."""

from __future__ import annotations

from typing import Any

from vlexport.backends import Backend
from vlexport.build_spec import BuildSpec
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import Recipe, recipe_for
from vlexport.specs import Precision


def subject_of(
    checkpoint: Checkpoint,
    precision: Precision | str = "float32",
    form: str = "grouped",
    recipe: Recipe[Any] | None = None,
    backend: Backend | None = None,
    input_dtype: str = "float32",
) -> BuildSpec:
    """Return the subject in the recipe's first profile; a backend brings its form."""
    recipe = recipe or recipe_for(checkpoint)
    config = recipe.read_config(checkpoint, input_dtype)
    return BuildSpec(
        recipe=recipe,
        config=config,
        checkpoint=checkpoint,
        form=backend.form if backend else form,
        precision=Precision(dtype=precision) if isinstance(precision, str) else precision,
        profile=next(iter(recipe.profiles(config).values())),
        tensors=recipe.stored_tensors(checkpoint, config),
        backend=backend,
    )
