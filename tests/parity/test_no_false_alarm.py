"""Right towers pass: three seeds, forty shape sets, every dtype and form in torch, and ONNX Runtime."""

import random
from dataclasses import replace

import pytest

from vlexport.backends import Engine, EngineSpec, Options, find_backend
from vlexport.export import export
from vlexport.parity.check import ladder
from vlexport.parity.mutants.judge import CAPS

SHAPE_SETS = 40


def forty(subject):
    """The recipe's own sets and enough random ones, small enough for two cores."""
    draw, known = random.Random(1), dict(subject.recipe.shape_sets(subject.config))
    while len(known) < SHAPE_SETS:
        known[f"random {len(known)}"] = [
            (
                kind,
                (
                    draw.randint(1, 3) if kind == "video" else 1,
                    2 * draw.randint(1, 9),
                    2 * draw.randint(1, 9),
                ),
            )
            for kind in draw.choices(("image", "video"), k=draw.randint(1, 3))
        ]
    return replace(subject, recipe=replace(subject.recipe, shape_sets=lambda _: known))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("form", ["runs", "rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_towers_in_torch_pass_on_forty_shape_sets(subject_of, climb, seed, form, dtype):
    subject = replace(subject_of(seed=seed, dtype=dtype), form=form)
    limits = {**subject.recipe.limits, **CAPS}
    report = climb(forty(replace(subject, recipe=replace(subject.recipe, limits=limits))), stop=False)
    assert report.status == "passed", report.table()


class Files:
    def __init__(self, folder):
        self.folder = folder

    def read(self, name):
        return (self.folder / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_right_engines_of_onnx_runtime_pass_on_forty_shape_sets(subject_of, seed, tmp_path):
    backend = find_backend("onnxruntime")
    subject = replace(subject_of(seed=seed), backend=backend)
    graph = export(subject.recipe, subject.checkpoint, form=backend.form)
    backend.build(graph, Options(threads=1), tmp_path)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    with Engine(backend.open(Files(tmp_path), spec, Options(threads=1)), spec) as engine:
        report = ladder(engine, forty(subject), stop=False)
    assert report.status == "passed", report.table()
