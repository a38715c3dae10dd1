"""The stored engine is looked at itself: its weights, and each of its blocks at any depth."""

from dataclasses import replace

import pytest
import torch

from tests.changed_recipes import with_tower
from tests.tiny_minicpmv import Tiny as MiniCPM
from tests.tiny_minicpmv import write_tiny_minicpmv
from vlexport._export import export
from vlexport.backends import Folder, Inside, Options, find_backend, inside_of
from vlexport.build_spec import BuildSpec
from vlexport.checkpoint import Checkpoint
from vlexport.parity.samples import Sample, random_items
from vlexport.parity.shipped import block_rows, rounding_rows, weight_rows
from vlexport.recipe import recipe_for
from vlexport.specs import Precision


@pytest.fixture(scope="module")
def shipped(towers, tmp_path_factory):
    """An engine's contents, its subject and one faint sample, by tower, backend and precision."""
    known = {}

    def made(tower, name, precision="float32"):
        if (tower, name, precision) not in known:
            backend, folder = find_backend(name), tmp_path_factory.mktemp("engine")
            checkpoint = towers(depth=12) if tower == "windows" else _slices(tmp_path_factory)
            recipe = recipe_for(checkpoint)
            config = recipe.read_config(checkpoint)
            scheme = next((c.quantisation for c in backend.capabilities if c.spelled == precision), None)
            dtype = "float32" if scheme else precision
            graph = export(recipe, checkpoint, form=backend.form, dtype=dtype, quantisation=scheme)
            backend.build(graph, Options(threads=1), folder)
            subject = BuildSpec(
                recipe=recipe,
                config=config,
                checkpoint=checkpoint,
                form=backend.form,
                precision=Precision(dtype=dtype, quantisation=scheme),
                profile=graph.profile,
                tensors=recipe.stored_tensors(checkpoint, config),
                backend=backend,
            )
            items = random_items(recipe, config, [("image", (1, 4, 6))], seed=0)
            faint = tuple(replace(item, patches=item.patches / 100) for item in items)
            known[tower, name, precision] = (
                inside_of(backend, Folder(folder)),
                subject,
                [Sample(name="one, faint", items=faint)],
            )
        return known[tower, name, precision]

    return made


def _slices(factory):
    tiny = MiniCPM(version="2.6", with_decoder=False)
    return Checkpoint.open(write_tiny_minicpmv(factory.mktemp("slices"), tiny, seed=0))


# A dozen blocks take OpenVINO half a minute.
OPENVINO = pytest.param("openvino", marks=pytest.mark.slow)


@pytest.mark.parametrize("tower", ["windows", "slices"])
@pytest.mark.parametrize("name", ["onnxruntime", OPENVINO])
def test_weights_and_blocks_of_a_right_engine_pass(shipped, tower, name):
    inside, subject, samples = shipped(tower, name)
    rows = [*weight_rows(inside, subject), *block_rows(inside, subject, samples)]
    assert {row.verdict for row in rows} == {"passed"}, [(row.check, row.note) for row in rows]
    depth = 12 if tower == "windows" else 3
    assert sum(row.check.startswith("engine block ") for row in rows) == 2 * depth


@pytest.mark.parametrize("name", ["onnxruntime", OPENVINO])
def test_integers_are_those_of_the_checkpoint(shipped, name):
    inside, subject, _ = shipped("windows", name, "int8")
    assert [row.verdict for row in weight_rows(inside, subject)] == ["passed"]
    changed = {
        key: value + 1 if key.endswith("qkv.weight.int8") else value for key, value in inside.weights.items()
    }
    (row,) = weight_rows(replace(inside, weights=changed), subject)
    assert (row.verdict, row.metrics["wrong"]) == ("failed", 12)


def test_rows_of_any_size_are_rounded_in_steps_of_their_own(shipped):
    inside, _, _ = shipped("windows", "onnxruntime", "int8")
    (row,) = rounding_rows(inside)
    assert row.verdict == "passed", row.metrics

    def coarse(rows):
        step = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=1e-3)
        return (rows / step).round() * step

    (row,) = rounding_rows(replace(inside, rounded=coarse))
    assert row.verdict == "failed"


def test_one_changed_bit_of_one_weight_fails(shipped):
    inside, subject, _ = shipped("windows", "onnxruntime")
    name = "blocks.11.mlp.down_proj.weight"
    changed = inside.weights[name].clone()
    changed.view(torch.int32)[0, 0] ^= 1
    (row,) = weight_rows(replace(inside, weights={**inside.weights, name: changed}), subject)
    assert (row.verdict, row.note) == ("failed", f"{name} differs")


@pytest.mark.parametrize("index", [0, 7, 11])
@pytest.mark.parametrize("norm", ["norm1", "norm2"])
def test_a_wrong_epsilon_in_the_stored_engine_alone_fails_at_any_depth(shipped, index, norm):
    """Rows of later blocks have grown, and hide it: each block gets faint rows of its own."""
    inside, subject, samples = shipped("windows", "onnxruntime")

    def change(tower):
        getattr(tower.blocks[index], norm).eps = 1e-5

    differing = replace(subject, recipe=with_tower(subject.recipe, change))
    failed = {row.check for row in block_rows(inside, differing, samples) if row.verdict == "failed"}
    assert failed == {f"engine block {index:02d}"}


def test_a_format_that_hides_its_contents_is_said_not_to_be_seen(shipped):
    _, subject, samples = shipped("windows", "onnxruntime")
    rows = [*weight_rows(Inside(), subject), *block_rows(Inside(), subject, samples)]
    assert [row.verdict for row in rows] == ["observed", "observed"]
    assert all(row.note.startswith("not seen: ") for row in rows)
