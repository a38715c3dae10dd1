"""The decoder of every family, in parts and by tokens, against transformers over whole sequences."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vlexport.recipes.demo import minicpmv
from vlexport.recipes.demo.writing import write_checkpoint

from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.recipe import find_recipe, list_recipes
from vlexport.runtime import decoder as module
from vlexport.runtime.decoder import DecoderOptions, TextModel, TransformersDecoder, load_text_model

CHUNKS = (11, 6, 140, 1, 1, 1)
FAMILIES = [card.name for card in list_recipes() if find_recipe(card.name).language]
MINICPMV = {"minicpmv-2.6": minicpmv.Tiny(version="2.6"), "minicpmv-4.5": minicpmv.Tiny(version="4.5")}


def loaded(name: str, folder: Path) -> tuple[TextModel, torch.nn.Module]:
    """Return a tiny text model as it runs here, and one of transformers alone with the same weights."""
    family = name.partition("-")[0]
    language = find_recipe(family).language
    assert language is not None
    demo: Any = importlib.import_module(f"vlexport.recipes.demo.{family}")
    made = demo.contents(MINICPMV[name]) if name in MINICPMV else demo.contents()
    checkpoint = Checkpoint.open(write_checkpoint(folder / name, made, seed=0))
    ours = load_text_model(checkpoint, language, "float32")
    theirs: Any = language.build(checkpoint)
    theirs.load_state_dict(ours.body.state_dict(), assign=True)
    module._fill_buffers(theirs)
    return ours, theirs.eval()


@pytest.mark.parametrize("name", sorted({*FAMILIES, *MINICPMV}))
def test_parts_of_a_sequence_give_the_logits_of_the_class_over_the_whole(name: str, tmp_path: Path) -> None:
    ours, theirs = loaded(name, tmp_path)
    decoder = TransformersDecoder(ours, DecoderOptions())
    random = torch.Generator().manual_seed(3)
    embeds = decoder.table.std() * torch.randn(sum(CHUNKS), decoder.width, generator=random)
    has_axes = name.startswith("qwen")
    positions = torch.arange(sum(CHUNKS)).expand(3 if has_axes else 1, -1)
    turn, end = decoder.begin(sum(CHUNKS)), 0
    for count in CHUNKS:
        part = slice(end, end := end + count)
        found = turn.step(embeds[part], positions[:, part])
        with torch.inference_mode():
            places = positions[:, None, :end] if has_axes else positions[:, :end]
            whole = theirs(inputs_embeds=embeds[None, :end], position_ids=places, use_cache=False)
            wanted = ours.head(whole.last_hidden_state[0, -1])
        assert torch.linalg.norm(found - wanted) < 1e-4 * torch.linalg.norm(wanted), end


def test_a_decoder_whose_layers_keep_states_of_another_kind_is_refused(tmp_path: Path) -> None:
    language: Any = find_recipe("nemotron_vl").language

    def without_d(checkpoint: Checkpoint) -> torch.nn.Module:
        body: torch.nn.Module = language.build(checkpoint)
        for layer in body.modules():
            if hasattr(layer, "A_log"):
                del layer.D
        return body

    demo: Any = importlib.import_module("vlexport.recipes.demo.nemotron_vl")
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny", demo.contents(), seed=0))
    with pytest.raises(UnsupportedError, match="keep states that are not Mamba's"):
        load_text_model(checkpoint, replace(language, build=without_d), "float32")
