"""The stored engine and the weights that it was made of: every bit of them, and each block at any depth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapters import write_adapter
from tests.changed_recipes import with_tower
from tests.mutation.judge import silent
from tests.quantised import write_quantised
from tests.subjects import subject_of
from tests.tiny_minicpmv import Tiny as MiniCPM
from tests.tiny_minicpmv import write_tiny_minicpmv
from vlexport._build.export import export
from vlexport.backends import Folder, Inside, Options, find_backend, inside_of
from vlexport.checkpoint import Checkpoint
from vlexport.parity.engine_contents import block_rows, rounding_rows, weight_rows
from vlexport.parity.inputs_exact import check_weights
from vlexport.parity.reference import run_blocks
from vlexport.parity.samples import Sample, random_items
from vlexport.specs import Precision

# Twelve blocks take OpenVINO half a minute, and ONNX Runtime a quarter.
DEPTH, DEEP = 4, 12


@pytest.fixture(scope="module")
def shipped(towers, tmp_path_factory):
    """An engine's contents, its subject and one faint sample, by tower, backend and precision."""

    @cache
    def made(tower, name, precision="float32", depth=DEPTH):
        backend, folder = find_backend(name), tmp_path_factory.mktemp("engine")
        if tower == "windows":
            checkpoint = towers(depth=depth)
        else:
            tiny = MiniCPM(version="2.6", with_decoder=False)
            checkpoint = Checkpoint.open(write_tiny_minicpmv(folder / "checkpoint", tiny, seed=0))
        scheme = next((c.quantisation for c in backend.capabilities if c.spelled == precision), None)
        known = Precision(dtype="float32" if scheme else precision, quantisation=scheme)
        subject = subject_of(checkpoint, known, backend=backend)
        graph = export(subject.recipe, checkpoint, form=backend.form, dtype=known.dtype, quantisation=scheme)
        backend.build(graph, Options(threads=1), folder)
        items = random_items(subject.recipe, subject.config, [("image", (1, 4, 6))], seed=0)
        faint = tuple(replace(item, patches=item.patches / 100) for item in items)
        return inside_of(backend, Folder(folder)), subject, [Sample(name="one, faint", items=faint)]

    return made


OPENVINO = pytest.param("openvino", marks=pytest.mark.slow)


@pytest.mark.seconds
@pytest.mark.parametrize("tower", ["windows", pytest.param("slices", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["onnxruntime", OPENVINO])
def test_weights_and_blocks_of_a_right_engine_pass(shipped, tower, name):
    inside, subject, samples = shipped(tower, name)
    rows = [*weight_rows(inside, subject), *block_rows(inside, subject, samples)]
    assert {row.verdict for row in rows} == {"passed"}, [(row.check, row.note) for row in rows]
    depth = DEPTH if tower == "windows" else 3
    assert sum(row.check.startswith("engine block ") for row in rows) == 2 * depth


def a_little_off(sums):
    """Sums of larger calls, of which one row in each is off by 1e-3."""

    def run(inputs, fed, wanted=()):
        taps = dict(sums(inputs, fed, wanted) if wanted else sums(inputs, fed))
        if len(inputs["patches"]) > 24:
            for name in wanted:
                taps[name] = taps[name].clone()
                taps[name][5] *= 1.001
        return taps

    return run


@pytest.mark.seconds
@pytest.mark.parametrize("tower", ["windows", pytest.param("slices", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["onnxruntime", OPENVINO, pytest.param("eager", marks=pytest.mark.slow)])
def test_blocks_of_a_stored_engine_are_held_to_the_references_on_larger_calls(shipped, tower, name):
    inside, subject, (faint,) = shipped(tower, name)
    items = random_items(subject.recipe, subject.config, [("image", (1, 8, 6)), ("image", (1, 4, 4))], seed=1)
    samples = [faint, Sample(name="two", items=items)]
    blocks = run_blocks(subject, samples, silent)
    rows = [row for row in block_rows(inside, subject, samples, blocks) if row.shapes == "two"]
    assert [row.verdict for row in rows] == ["passed"] * len(blocks["two"]), [row.metrics for row in rows]
    wrong = replace(inside, sums=a_little_off(inside.sums))
    rows = list(block_rows(wrong, subject, samples, blocks))
    assert {(row.check, row.shapes) for row in rows if row.verdict == "failed"} == {
        (f"engine block {index:02d}", "two") for index in range(len(blocks["two"]))
    }
    assert all("noise" in row.metrics for row in rows if row.verdict == "failed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnxruntime", OPENVINO])
def test_integers_are_those_of_the_checkpoint(shipped, name):
    inside, subject, _ = shipped("windows", name, "int8")
    assert [row.verdict for row in weight_rows(inside, subject)] == ["passed"]
    changed = {
        key: value + 1 if key.endswith("qkv.weight.int8") else value for key, value in inside.weights.items()
    }
    (row,) = weight_rows(replace(inside, weights=changed), subject)
    assert (row.verdict, row.metrics["wrong"]) == ("failed", DEPTH)


@pytest.mark.slow
def test_rows_of_any_size_are_rounded_in_steps_of_their_own(shipped):
    inside, _, _ = shipped("windows", "onnxruntime", "int8")
    (row,) = rounding_rows(inside)
    assert row.verdict == "passed", row.metrics

    def coarse(rows):
        step = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=1e-3)
        return (rows / step).round() * step

    (row,) = rounding_rows(replace(inside, rounded=coarse))
    assert row.verdict == "failed"


@pytest.mark.parametrize(
    ("name", "place"),
    [(f"blocks.{DEPTH - 1}.mlp.down_proj.weight", (0, 0)), ("frequencies", -1)],
    ids=["weight", "constant"],
)
def test_one_changed_bit_of_one_tensor_fails(shipped, name, place):
    inside, subject, _ = shipped("windows", "onnxruntime")
    changed = inside.weights[name].clone()
    changed.view(torch.int32)[place] ^= 1
    (row,) = weight_rows(replace(inside, weights={**inside.weights, name: changed}), subject)
    assert (row.verdict, row.note) == ("failed", f"{name} differs")


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "indices"), [(DEPTH, (0, 3)), (DEEP, (0, 7, 11))])
def test_a_wrong_epsilon_in_the_stored_engine_alone_fails_at_any_depth(shipped, depth, indices):
    """Rows of later blocks have grown, and hide it: each block gets faint rows of its own."""
    inside, subject, samples = shipped("windows", "onnxruntime", depth=depth)
    for index, norm in product(indices, ("norm1", "norm2")):

        def change(tower, index=index, norm=norm):
            getattr(tower.blocks[index], norm).eps = 1e-5

        differing = replace(subject, recipe=with_tower(subject.recipe, change))
        failed = {row.check for row in block_rows(inside, differing, samples) if row.verdict == "failed"}
        assert failed == {f"engine block {index:02d}"}, norm


def test_a_format_that_hides_its_contents_is_reported_as_not_seen(shipped):
    _, subject, samples = shipped("windows", "onnxruntime")
    rows = [*weight_rows(Inside(), subject), *block_rows(Inside(), subject, samples)]
    assert [row.verdict for row in rows] == ["observed", "observed"]
    assert all(row.note.startswith("not seen: ") for row in rows)


KINDS = ("plain", "adapter", "fp8")


class Wrong:
    """Weights of which one value of one tensor is read otherwise, by a rounding of float32."""

    def __init__(self, weights: Any, name: str) -> None:
        self.weights, self.name = weights, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.read(names, dtype):
            if name == self.name:
                tensor = tensor.clone()
                place = int(tensor.abs().argmax())
                tensor.view(-1)[place] *= 1 + torch.finfo(torch.float32).eps
            yield name, tensor


@pytest.fixture(scope="module", params=KINDS)
def subject(request: Any, towers: Any, tmp_path_factory: Any) -> Any:
    plain, folder = towers(), Path(tmp_path_factory.mktemp("weights"))
    if request.param == "adapter":
        return subject_of(Checkpoint.open(plain.path, lora=write_adapter(folder, plain)))
    if request.param == "plain":
        return subject_of(plain)
    return subject_of(Checkpoint.open(write_quantised(folder / "quantised", plain.path, request.param)))


def test_one_value_of_any_tensor_is_seen_but_for_those_that_are_computed(subject: Any) -> None:
    checkpoint, config = subject.checkpoint, json.loads((subject.checkpoint.path / "config.json").read_text())
    is_plain = checkpoint.adapter is None and "quantization_config" not in config
    assert check_weights(subject) == {"weights": ""}
    for name, stored in subject.recipe.weight_names(checkpoint, subject.config).items():
        wrong = replace(checkpoint, weights=Wrong(checkpoint.weights, name))
        is_computed = not is_plain and ".blocks." in stored and len(checkpoint.stored(stored).shape) == 2
        seen = "" if is_computed else f"{name}, 1 in all"
        assert check_weights(replace(subject, checkpoint=wrong)) == {"weights": seen}, name
