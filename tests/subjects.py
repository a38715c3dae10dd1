"""What the gate is given about a tower, from its recipe and checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlexport._build.export import export
from vlexport._build.spec import BuildSpec
from vlexport.backends import Backend, Engine, EngineSpec, Folder, Inside, Options, inside_of
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


@contextmanager
def opened_engine(subject: BuildSpec) -> Iterator[tuple[Engine, Inside | None]]:
    """Build a subject's engine with its backend, without a bundle; yield it with its stored files."""
    backend, options = subject.backend, Options(threads=1)
    assert backend is not None
    graph = export(
        subject.recipe, subject.checkpoint, form=backend.form, dtype=subject.dtype,
        quantisation=subject.quantisation,
    )  # fmt: skip
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    with tempfile.TemporaryDirectory() as folder:
        backend.build(graph, options, Path(folder))
        files = Folder(Path(folder))
        with Engine(backend.open(files, spec, options), spec) as engine:
            yield engine, inside_of(backend, files)
