"""Right towers pass: three seeds, forty shape sets, every dtype and form in torch, and every backend."""

import random
from dataclasses import replace

import pytest

from tests.backends.towers import build_tower
from tests.changed_recipes import with_mixes
from tests.golden_towers import sharp_weights, write_recorded_tower
from tests.mutation.judge import CAPS
from tests.subjects import subject_of
from tests.tiny_minicpmv import VERSIONS, write_tiny_minicpmv
from tests.tiny_minicpmv import Tiny as MiniCPM
from vlexport.backends import Folder, backend_names, find_backend, inside_of, runs_here
from vlexport.parity.check import run_checks

SHAPE_SETS = 40


def forty(subject):
    """The recipe's own sets and enough random ones, small enough for two cores."""
    draw, known = random.Random(1), dict(subject.recipe.shape_sets(subject.config))
    kinds = sorted({kind for mix in known.values() for kind, _ in mix})
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
            for kind in draw.choices(kinds, k=draw.randint(1, 3))
        ]
    return replace(subject, recipe=with_mixes(subject.recipe, known))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("form", ["grouped", "padded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_towers_in_torch_pass_on_forty_shape_sets(towers, climb, seed, form, dtype):
    subject = subject_of(towers(seed=seed), dtype, form)
    limits = {**subject.recipe.limits, **CAPS}
    report = climb(forty(replace(subject, recipe=replace(subject.recipe, limits=limits))), stop=False)
    assert report.status == "passed", report.table()


def served_here():
    """Every backend that runs on this machine, with every dtype that it serves."""
    served = [
        (backend.name, each.dtype)
        for backend in map(find_backend, backend_names())
        for each in backend.capabilities
        if runs_here(backend, each.precision)
    ]
    return list(dict.fromkeys(served))


def write_tower(tower, folder, seed):
    """A recorded architecture with weights of a seed, or a tiny one of a release."""
    family, which = tower.split(" ")
    if family == "windows":
        return write_recorded_tower(folder, int(which), sharp_weights(int(which), seed))
    return write_tiny_minicpmv(folder, MiniCPM(version=which, with_decoder=False), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "dtype"), served_here())
@pytest.mark.parametrize("tower", ["windows 0", "windows 1", *(f"slices {each}" for each in VERSIONS)])
def test_right_engines_pass_on_forty_shape_sets(tower, name, dtype, seed, tmp_path):
    checkpoint = write_tower(tower, tmp_path / "checkpoint", seed)
    built, backend = build_tower(checkpoint, name, tmp_path / "engine", dtype=dtype), find_backend(name)
    subject = subject_of(built.checkpoint, dtype, backend=backend)
    inside = inside_of(backend, Folder(built.files))
    with built.engine as engine:
        report = run_checks(engine, forty(subject), inside=inside, stop=False)
    assert report.status == "passed", report.table()
