"""First versions of private recipes and backends, each with its first test: files to extend by hand."""

from __future__ import annotations

import re
from keyword import iskeyword
from pathlib import Path
from string import Template

from vlexport.backends import backend_names
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError, RequestError, UnknownModelError
from vlexport.recipe import find_recipe
from vlexport.runtime.outputs import check_out

RECIPE = '''"""$class_name of transformers, traced whole by the parts of the generic recipe.

Written by `vlexport new recipe` from a config.json, with transformers $version:

    form       $form, by a $rule
    processor  $processor
    bounds     $bounds
    outputs    $outputs

Replace the parts by hand, one by one; recipes/README.md describes each field.
"""

from vlexport.recipe import Recipe
from vlexport.recipes import generic

RECIPE = Recipe(
    name="$name",
    summary="$class_name of transformers, traced whole",
    model_types=("$model_type",),
    # By hand: a frozen dataclass of the numbers that shape graph and inputs.
    config=generic.Config,
    # Rows of a call, and which of them attend to each other. By hand: `GridPacking`, or a `Packing`.
    packing=generic.packing,
    # The class as it is. By hand: a `GridTower` of `Block`s, which is checked block by block.
    modules=generic.tower,
    stored_names=generic.names,
    preprocess=generic.preprocess,
    # The class in float32, which checks a tower that is written by hand too.
    reference=generic.reference,
    # Transformers' whole model answers. By hand: a `LanguageRule` as `language` in its place.
    pictures=lambda config: config.image,
    position_rule="linear",
    pruning_rule=None,
    # By hand: numbers that `vlexport check BUNDLE --accuracy -v` prints, with their origin.
    limits=generic.RECIPE.limits,
)
'''

BACKEND = '''"""The traced program, stored as it is and run by PyTorch: replace `build` and `open`.

Used by its path, `vlexport build SOURCE --backend $name.py`, or from a package by an entry point:

    [project.entry-points."vlexport.backends"]
    $name = "PACKAGE.$name"
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport import backends

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport import Graph

LIBRARY, PROGRAM = "torch", "program.pt2"


class $class_name(backends.Backend):
    name = "$name"
    summary = "the traced program, run by PyTorch"
    form = "padded"
    capabilities = (backends.Capability(dtype="float32"),)

    # Libraries are imported in methods: `vlexport list` runs this file where they are missing.
    def build(self, graph: Graph, options: backends.Options, out: Path, progress: object = None) -> None:
        import torch

        torch.export.save(graph.program, out / PROGRAM)

    def open(
        self, payloads: backends.Payloads, spec: backends.EngineSpec, options: backends.Options
    ) -> backends.Runner:
        import torch

        content = payloads.read(PROGRAM)
        with backends.refused_by(LIBRARY):
            module = torch.export.load(io.BytesIO(content)).module()

        def run(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            with backends.refused_by(LIBRARY, tensors=tensors):
                return module(tensors)

        return backends.FunctionRunner(run)


BACKEND = $class_name()
'''

TEST = """from pathlib import Path

from vlexport.testing import check_$kind

CHECKPOINT = $checkpoint


def test_the_${kind}_conforms() -> None:
    report = check_$kind(Path(__file__).with_name("$name.py"), CHECKPOINT)
    assert report.passed, report.table()
"""


def new_recipe(source: str, out: Path | None = None) -> list[Path]:
    """Write the recipe of a checkpoint's model type, and its test; return both paths."""
    import transformers

    from vlexport.vision.features.classes import feature_class, no_class

    checkpoint, generic = Checkpoint.open(source), find_recipe("generic")
    model_type = checkpoint.model_type
    if (classes := feature_class(model_type)) is None:
        raise UnknownModelError(no_class(model_type))
    config = generic.read_config(checkpoint)
    # Strings of a checkpoint become parts of a program.
    if not config.image.name.isidentifier():
        raise CheckpointError(f"{source}: processor {config.image.name!r}; the name of a class expected.")
    bounds = [
        f"{name} {size.min} to {size.max} {symbol}"
        for name, profile in generic.profiles(config).items()
        for symbol, size in list(profile.ranges.items())[:1]
    ]
    facts = {"form": config.form, "rule": type(config.rule).__name__, "processor": config.image.name}
    facts |= {"bounds": ", ".join(bounds), "outputs": ", ".join(config.outputs), "model_type": model_type}
    facts |= {"class_name": classes[0].__name__, "version": transformers.__version__}
    out = out or Path(re.sub(r"\W", "_", model_type) + ".py")
    return _write(out, RECIPE, {**facts, "kind": "recipe", "checkpoint": repr(checkpoint.location.place)})


def new_backend(name: str, out: Path | None = None) -> list[Path]:
    """Write a backend that stores and runs the traced program, and its test; return both paths."""
    out = out or Path(f"{name}.py")
    if name in backend_names() or out.stem != name:
        raise RequestError(f"backend '{name}' in {out}: a new name, which the file has too, is expected.")
    class_name = "".join(map(str.capitalize, name.split("_")))
    return _write(
        out, BACKEND, {"class_name": class_name, "kind": "backend", "checkpoint": "None  # that of the demo"}
    )


def _write(out: Path, text: str, words: dict[str, str]) -> list[Path]:
    class_name = words["class_name"]
    if not out.stem.isidentifier() or not class_name.isidentifier() or iskeyword(class_name):
        raise RequestError(
            f"{out}: letters, digits and _ are expected as a name, a letter first, that is no word of "
            "Python. Rename it."
        )
    contents = {out: text, out.with_name(f"test_{out.name}"): TEST}
    for path in contents:
        check_out(path, suffix=".py")
        if path.exists():
            raise RequestError(
                f"--output {path}: is there, a new file is expected. Move it, or name another."
            )
    for path, template in contents.items():
        path.write_text(Template(template).substitute(words, name=out.stem), encoding="utf-8")
    return list(contents)
