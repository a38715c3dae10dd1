"""Queries, keys and values that are stored apart, as serving engines read them too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.subjects import subject_of
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.files import JoinedWeights
from vlexport.errors import CheckpointError
from vlexport.parity.inputs_exact import check_weights
from vlexport.recipe import recipe_for


def apart(folder: Path, form: str, drop: str = "") -> Checkpoint:
    """Write the tiny checkpoint with its joined tensors cut into three."""
    write_tiny_qwen2_5_vl(folder, depth=2, with_decoder=False)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".qkv." not in name:
            found[name] = tensor
            continue
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            found[name.replace("qkv", form.format(part))] = rows.contiguous()
    found.pop(drop, None)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint.open(folder)


@pytest.mark.parametrize("form", ["{}", "{}_proj"])
def test_parts_are_joined_in_weights_biases_and_the_reference(form, tmp_path):
    whole = Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path / "whole", depth=2, with_decoder=False))
    parts, recipe = apart(tmp_path / "apart", form), recipe_for(whole)
    config = recipe.read_config(parts)
    names = recipe.weight_names(parts, config)
    assert names == recipe.weight_names(whole, config)
    wanted = whole.read(names)
    given = parts.read(names)
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], each) for name, each in wanted.items())
    assert {each.name: each.shape for each in recipe.stored_tensors(parts, config).values()} == {
        each.name: each.shape for each in recipe.stored_tensors(whole, config).values()
    }
    assert check_weights(subject_of(parts)) == {"weights": ""}
    items: list[Any] = [recipe.item(config, "image", (1, 4, 4), torch.ones(16, recipe.row_width(config)))]
    rows = [recipe.reference(each).run(items)["embeds"] for each in (whole, parts)]
    assert torch.equal(*rows)


def test_a_digest_sees_every_part_and_their_order(tmp_path):
    parts = apart(tmp_path / "apart", "{}")
    recipe = recipe_for(parts)
    names = recipe.weight_names(parts, recipe.read_config(parts))
    seen = {parts.digest(names)}
    for part in ("q", "k", "v"):
        tensors = load_file(tmp_path / "apart" / "model.safetensors")
        tensors[f"visual.blocks.1.attn.{part}.bias"][3] += 1
        save_file(tensors, tmp_path / "apart" / "model.safetensors", metadata={"format": "pt"})
        seen.add(Checkpoint.open(tmp_path / "apart").digest(names))
    keys, values = (tensors[f"visual.blocks.0.attn.{part}.weight"] for part in ("k", "v"))
    tensors |= {"visual.blocks.0.attn.k.weight": values, "visual.blocks.0.attn.v.weight": keys}
    save_file(tensors, tmp_path / "apart" / "model.safetensors", metadata={"format": "pt"})
    seen.add(Checkpoint.open(tmp_path / "apart").digest(names))
    assert len(seen) == 5


def test_a_check_sees_parts_in_another_order(tmp_path, monkeypatch):
    parts = apart(tmp_path / "apart", "{}")
    right = JoinedWeights.parts
    monkeypatch.setattr(JoinedWeights, "parts", lambda self, name: right(self, name)[::-1])
    assert "qkv" in check_weights(replace(subject_of(parts)))["weights"]


def test_two_parts_of_three_and_parts_of_other_widths_are_refused(tmp_path):
    missing = apart(tmp_path / "missing", "{}", drop="visual.blocks.0.attn.v.bias")
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*blocks.0.attn.qkv.bias"):
        recipe_for(missing).weight_names(missing, recipe_for(missing).read_config(missing))
    odd = apart(tmp_path / "odd", "{}")
    tensors = load_file(tmp_path / "odd" / "model.safetensors")
    tensors["visual.blocks.0.attn.k.weight"] = tensors["visual.blocks.0.attn.k.weight"][:, :-1].contiguous()
    save_file(tensors, tmp_path / "odd" / "model.safetensors", metadata={"format": "pt"})
    odd = Checkpoint.open(tmp_path / "odd")
    with pytest.raises(CheckpointError, match="expected one dtype and width"):
        recipe_for(odd).weight_names(odd, recipe_for(odd).read_config(odd))
