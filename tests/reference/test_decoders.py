"""Weights of the language model behind a tower: bytes of its files, times what config.json scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import recipe_for
from vlexport.runtime.decoder import load_text_model

TABLE, OUTPUT = "embed_tokens.weight", "lm_head.weight"


def written(name: str, folder) -> Checkpoint:
    if name == "qwen2_5_vl":
        return Checkpoint.open(write_tiny_qwen2_5_vl(folder, depth=1))
    return Checkpoint.open(write_tiny_minicpmv(folder, Tiny(version=name, depth=1)))


@pytest.mark.parametrize("name", ["qwen2_5_vl", *VERSIONS])
def test_a_decoder_holds_the_stored_weights_times_what_its_config_scales(name: str, tmp_path) -> None:
    checkpoint = written(name, tmp_path / "checkpoint")
    rule = recipe_for(checkpoint).language
    assert rule is not None
    names = checkpoint.tensor_names()
    prefix = next(each for each in rule.prefixes if f"{each}{TABLE}" in names)
    stored = {each.removeprefix(prefix): each for each in names if each.startswith(prefix)}
    stored[OUTPUT] = next((each for each in rule.heads if each in names), stored[TABLE])
    model = load_text_model(checkpoint, rule, "float32")
    given = {**model.body.state_dict(), OUTPUT: model.head.weight}
    raw = load_file(checkpoint.path / "model.safetensors")
    factors = factors_of(checkpoint.config)
    assert bool(factors) == (name == "2.0")
    for end, where in stored.items():
        factor = next((factors[each] for each in factors if end.endswith(each)), 1.0)
        wanted = raw[where].double() * factor
        torch.testing.assert_close(given[end].double(), wanted, rtol=1e-6, atol=0.0)


def factors_of(config: Mapping[str, object]) -> dict[str, float]:
    """Return what decoders with these entries multiply: embeddings, both branches of a layer, logits."""
    if "scale_emb" not in config:
        return {}
    read = {name: float(str(config[name])) for name in ("scale_emb", "scale_depth", "dim_model_base")}
    depth, width = (float(str(config[name])) for name in ("num_hidden_layers", "hidden_size"))
    branches = read["scale_depth"] / math.sqrt(depth)
    return {
        TABLE: read["scale_emb"],
        "o_proj.weight": branches,
        "down_proj.weight": branches,
        OUTPUT: read["dim_model_base"] / width,
    }


@pytest.mark.parametrize("version", ["2.6", "4.0"])
def test_rotary_settings_of_older_files_are_those_that_the_class_reads(version: str, tmp_path) -> None:
    given = {"rope_theta": 1000000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    tiny = Tiny(version=version, depth=1)
    checkpoint = Checkpoint.open(write_tiny_minicpmv(tmp_path / "checkpoint", tiny, config=given))
    rule = recipe_for(checkpoint).language
    assert rule is not None
    body: Any = load_text_model(checkpoint, rule, "float32").body
    theirs = AutoConfig.for_model(body.config.model_type, **given).rope_parameters
    assert {name: body.config.rope_parameters[name] for name in ("rope_theta", "factor")} == {
        name: theirs[name] for name in ("rope_theta", "factor")
    }
    wanted = 1 / 1000000.0 ** (torch.arange(0, 64, 2) / 64) / 2.0
    torch.testing.assert_close(body.rotary_emb.inv_freq, wanted)
