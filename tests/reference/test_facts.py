"""Numbers of towers by transformers' config class, and towers against references in float64."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.reference.slice_config import assert_facts, config_facts
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.parity.noise import StayWide, in_float64
from vlexport.parity.samples import random_items
from vlexport.recipe import find_recipe

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
def test_every_number_is_the_one_that_their_class_reads(
    family: str, left_out: str | None, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_of_a_sliced_config_is_the_fact_of_its_release(version: str, tmp_path: Path) -> None:
    for drop_last in (False, True):
        tiny = Tiny(version=version, depth=2, drop_last=drop_last, with_decoder=False)
        checkpoint = Checkpoint.open(write_tiny_minicpmv(tmp_path / f"{drop_last}", tiny))
        config = find_recipe("minicpmv").read_config(checkpoint)
        assert_facts(config, config_facts(checkpoint))
