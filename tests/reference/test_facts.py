"""Numbers of towers by transformers' config class, towers in float64, and constants bit for bit."""

from __future__ import annotations

import importlib
import json
import operator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from vlexport.recipes.demo.writing import write_checkpoint

from tests.mutation.trials import demo_trials, recipe_of
from tests.reference.slice_config import assert_facts, config_facts
from tests.subjects import subject_of
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.export import trace
from vlexport._build.graph import TowerSpec
from vlexport.checkpoint import Checkpoint
from vlexport.parity.inputs_exact import constant_rows
from vlexport.parity.noise import StayWide, in_float64, tables_of
from vlexport.parity.pixels import reference_of
from vlexport.parity.samples import random_items
from vlexport.recipe import find_recipe
from vlexport.vision.rotary import inverse_frequencies

# Tables of sines and of resized places are float32 on both sides.
WIDE = 1e-6
# Every entry of `vision_config` that shapes graph or inputs, none at transformers' default; those that the
# recipe does not demand; and the names of the recipe's fields in transformers' class. `rule` is judged by
# test_settings.
ROPE = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "axial"}}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 3, "hidden_size": 48, "num_heads": 3, "intermediate_size": 40, "out_hidden_size": 56,
        "window_size": 84, "fullatt_block_indexes": [0, 2], "tokens_per_second": 5, **ROPE,
    },
    "qwen2_vl": {
        "depth": 3, "embed_dim": 48, "num_heads": 3, "hidden_size": 56, "mlp_ratio": 3, **ROPE,
    },
    "qwen3_vl": {
        "depth": 30, "hidden_size": 48, "num_heads": 3, "intermediate_size": 40, "out_hidden_size": 56,
        "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2], "patch_size": 14, **ROPE,
    },
}  # fmt: skip
OPTIONAL = {
    "qwen2_5_vl": ("window_size", "fullatt_block_indexes", "tokens_per_second", "rope_parameters"),
    "qwen2_vl": ("mlp_ratio", "rope_parameters"),
    "qwen3_vl": ("num_position_embeddings", "deepstack_visual_indexes", "rope_parameters"),
}
NAMES: dict[str, dict[str, str]] = {
    "qwen2_5_vl": {
        "depth": "depth", "width": "hidden_size", "heads": "num_heads", "inner": "intermediate_size",
        "out_width": "out_hidden_size", "window_size": "window_size", "full_blocks": "fullatt_block_indexes",
        "tokens_per_second": "tokens_per_second",
    },
    "qwen2_vl": {
        "depth": "depth", "width": "embed_dim", "heads": "num_heads", "inner": "inner",
        "out_width": "hidden_size",
    },
    "qwen3_vl": {
        "depth": "depth", "width": "hidden_size", "heads": "num_heads", "inner": "intermediate_size",
        "out_width": "out_hidden_size", "table_side": "table_side",
        "level_blocks": "deepstack_visual_indexes",
    },
}  # fmt: skip
LEFT_OUT = [(family, name) for family, names in OPTIONAL.items() for name in (None, *names)]


@pytest.mark.parametrize(("family", "left_out"), LEFT_OUT)
def test_every_number_is_the_one_that_their_class_reads(family, left_out, tmp_path):
    path = write_tiny_qwen2_5_vl(tmp_path / "checkpoint", depth=1, with_decoder=False)
    stored = json.loads((path / "config.json").read_text())
    given = {**VISION[family]}
    given.pop(left_out or "", None)
    (path / "config.json").write_text(json.dumps({**stored, "model_type": family, "vision_config": given}))
    config = find_recipe(family).read_config(Checkpoint.open(path))
    theirs: Any = AutoConfig.for_model(family).vision_config.__class__(**given)
    if family == "qwen2_vl":
        # As their `Qwen2VLVisionBlock` sizes its MLP.
        theirs.inner = int(theirs.embed_dim * theirs.mlp_ratio)
    if family == "qwen3_vl":
        # As their `Qwen3VLVisionModel` sizes its table.
        theirs.table_side = int(theirs.num_position_embeddings**0.5)
    assert {field.name for field in fields(config)} == {*NAMES[family], "rope_theta", "rule"}
    for ours, name in NAMES[family].items():
        wanted = getattr(theirs, name)
        found = getattr(config, ours)
        assert found == (tuple(wanted) if isinstance(wanted, list | tuple) else wanted), ours
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    units = (config.rule.patch, config.rule.merge, config.rule.temporal)
    assert units == (theirs.patch_size, theirs.spatial_merge_size, theirs.temporal_patch_size)


@pytest.mark.parametrize("version", VERSIONS)
def test_towers_equal_their_reference_in_float64(version: str, tmp_path: Path) -> None:
    """An epsilon of 1e-5 for 1e-6 is 5e-6 here, under the noise of float32 and far above that of float64."""
    tiny = Tiny(version=version, depth=2, with_decoder=False)
    checkpoint = Checkpoint.open(write_tiny_minicpmv(tmp_path / "checkpoint", tiny))
    recipe = find_recipe("minicpmv")
    config = recipe.read_config(checkpoint)
    items = list(random_items(recipe, config, [("image", (1, 5, 7)), ("image", (1, 3, 4))], seed=1))
    wanted = in_float64(recipe.reference(checkpoint), items)["embeds"]
    tower = recipe.tower(checkpoint, "float32").double()
    given = recipe.prepare(config, items, "grouped")
    inputs = {name: each.double() if each.is_floating_point() else each for name, each in given.items()}
    with StayWide(), torch.inference_mode():
        found = tower(inputs)["embeds"]
    error = float((found - wanted).norm() / wanted.norm())
    assert error < WIDE, error


@pytest.mark.seconds
@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_of_a_sliced_config_is_the_fact_of_its_release(version: str, tmp_path: Path) -> None:
    for drop_last in (False, True):
        tiny = Tiny(version=version, depth=2, drop_last=drop_last, with_decoder=False)
        checkpoint = Checkpoint.open(write_tiny_minicpmv(tmp_path / f"{drop_last}", tiny))
        config = find_recipe("minicpmv").read_config(checkpoint)
        assert_facts(config, config_facts(checkpoint))


# Classes of transformers and the settings of their rotation.
CLASSES = {
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VLVisionRotaryEmbedding", "embed_dim"),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VLVisionRotaryEmbedding", "hidden_size"),
    "qwen3_vl": ("Qwen3VLVisionConfig", "Qwen3VLVisionRotaryEmbedding", "hidden_size"),
}
# Head widths of released towers, of which 80, 72 and 128 showed another `pow`.
WIDTHS = (64, 72, 80, 128)
# What each library computes by a routine of its own, so that results differ by a step.
ROUNDED_OTHERWISE = {"pow", "exp", "exp2", "log", "sin", "cos", "rsqrt", "tanh", "erf"}
QUICK = ("windows", "slices")
TRIALS = [
    trial if trial in QUICK else pytest.param(trial, marks=pytest.mark.slow)
    for family in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "kimi_vl", "minicpmv", "nemotron_vl")
    for trial in list(demo_trials(family))[:1]
]


def test_frequencies_are_those_of_transformers_bit_for_bit(subtests):
    for family, (settings, rotation, width_name) in CLASSES.items():
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        config = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        for width in WIDTHS:
            with subtests.test(f"{family} {width}"):
                made = getattr(config, settings)(**{width_name: 2 * width, "num_heads": 2})
                theirs = getattr(module, rotation)(made).inv_freq
                assert torch.equal(inverse_frequencies(width, 10000.0), theirs)


@pytest.fixture(scope="module")
def subject(request, tmp_path_factory):
    family = recipe_of(request.param)
    demo = importlib.import_module(f"vlexport.recipes.demo.{family}")
    contents = demo.contents(demo_trials(family)[request.param])
    folder = write_checkpoint(tmp_path_factory.mktemp("tower") / "checkpoint", contents, seed=0)
    return subject_of(Checkpoint.open(folder))


@pytest.mark.parametrize("subject", TRIALS, indirect=True)
def test_no_graph_computes_a_constant_and_those_of_the_reference_are_held(subject):
    shared = {"recipe", "checkpoint", "config", "precision", "form", "profile"}
    program = trace(TowerSpec(**{name: getattr(subject, name) for name in shared})).program
    signature = program.graph_signature
    known = signature.inputs_to_buffers.keys() | signature.inputs_to_lifted_tensor_constants.keys()
    fixed: set[torch.fx.Node] = {node for node in program.graph.nodes if node.name in known}
    computed = []
    for node in program.graph.nodes:
        given = node.all_input_nodes
        if node.op != "call_function" or not set(given) <= fixed:
            continue
        if isinstance(node.meta.get("val"), torch.Tensor) and node.target is not operator.getitem:
            fixed.add(node)
            name = str(node.target).removeprefix("aten.").split(".")[0]
            computed += [str(node)] if name in ROUNDED_OTHERWISE else []
    assert computed == []
    tables = list(tables_of(reference_of(subject).module).values())
    assert {row.verdict for row in constant_rows(subject, tables)} <= {"passed"}
    if subject.recipe.name == "minicpmv":
        width = subject.config.tower.out_width // 2
        omega = 1 / np.float32(10000) ** (np.arange(width // 2, dtype=np.float32) / np.float32(width // 2))
        assert any(
            torch.equal(each, torch.from_numpy(omega))
            for each in program.constants.values()
            if isinstance(each, torch.Tensor)
        )
    elif tables:
        assert [row.metrics["wrong"] for row in constant_rows(subject, tables)] == [0.0]


@pytest.mark.parametrize("subject", ["windows"], indirect=True)
def test_a_constant_one_step_of_float32_off_fails(subject):
    (theirs,) = {float(each[-1]): each for each in tables_of(reference_of(subject).module).values()}.values()
    off = theirs.clone()
    off.view(torch.int32)[-1] += 1
    (row,) = constant_rows(subject, [off])
    assert (row.level, row.verdict) == ("L0", "failed")
    assert "frequencies differs" in row.note
    held, lost = constant_rows(subject, [theirs, torch.ones(3)])
    assert (held.verdict, lost.verdict) == ("passed", "observed")
    (row,) = constant_rows(subject, [off, theirs])
    assert row.verdict == "passed"
    (row,) = constant_rows(subject, [])
    assert row.verdict == "observed"
