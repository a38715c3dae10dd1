"""Decoders: stored weights times what configs scale, logits of classes, prefill in chunks of any size."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, DeepseekV3ForCausalLM
from vlexport.recipes.demo.writing import write_checkpoint

from tests.runtime.recorded import CHECKPOINT
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.positions.mrope import initial_positions, pruned_positions
from vlexport.positions.rules import PlacedMedia, PositionRule, PromptPositions
from vlexport.recipe import find_recipe, recipe_for
from vlexport.runtime import generate
from vlexport.runtime.decoder import (
    DecoderOptions,
    TransformersDecoder,
    load_language,
    load_text_model,
)
from vlexport.runtime.request import Generation, Request, RequestState

NEMOTRON = "transformers.models.nemotron_h_omni"


def language_of(family: str) -> Any:
    language = find_recipe(family).language
    assert language is not None
    return language


DEEPSEEK = "language_model."


def text_model_of(checkpoint: Checkpoint, folder: Path) -> Any:
    """Write the decoder as a checkpoint of its own and let transformers read it."""
    settings: Any = dict(checkpoint.config["text_config"])  # type: ignore[call-overload]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(folder)
    stored = load_file(checkpoint.path / "model.safetensors")
    own = {name.removeprefix(DEEPSEEK): each for name, each in stored.items() if name.startswith(DEEPSEEK)}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return DeepseekV3ForCausalLM.from_pretrained(folder).eval()


def class_of(name: str, checkpoint: Checkpoint, folder: Path) -> Any:
    if name == "kimi_vl":
        model = text_model_of(checkpoint, folder)
        assert model.config.rope_parameters["rope_theta"] == 800000.0
        return model
    reason = "transformers has no nemotron_h_omni"
    classes: Any = pytest.importorskip(f"{NEMOTRON}.modeling_nemotron_h_omni", reason=reason)
    return classes.NemotronH_Omni_Reasoning_V3.from_pretrained(checkpoint.path).eval().language_model


@pytest.mark.parametrize(
    ("name", "uncompiled"),
    [("kimi_vl", "chooses experts by its tokens"), ("nemotron_vl", "layers with states of their own")],
)
def test_a_decoder_gives_the_logits_of_the_class_that_reads_its_files_whole_and_in_chunks(
    name, uncompiled, tmp_path
):
    demo = importlib.import_module(f"vlexport.recipes.demo.{name}")
    made = demo.contents(demo.Tiny(depth=1))
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny", made, seed=0))
    language = language_of(name)
    model = class_of(name, checkpoint, tmp_path / "class")
    decoder = load_language(checkpoint, language, DecoderOptions()).decoder
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model(input_ids=ids[None]).logits[0]
    embeds, positions = decoder.embed(ids), torch.arange(40)[None]
    # Convolutions of Nemotron look back three tokens.
    for parts in ([40], [17, 23], [39, 1], [2, 1, 1, 36]):
        turn, start = decoder.begin(40), 0
        for count in parts:
            logits = turn.step(embeds[start : start + count], positions[:, start : start + count])
            start += count
            # Sums over other batch sizes; logits are up to 4.
            torch.testing.assert_close(logits, wanted[start - 1], rtol=0, atol=1e-5)
    with pytest.raises(UnsupportedError, match=uncompiled):
        load_language(checkpoint, language, DecoderOptions(compile=True))


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


# Float32 sums in another order, on logits around 1.
CHUNK_LIMIT = 2e-5
TIMED = PositionRule(kind="time_scaled", merge=2, tokens_per_second=2.0)
# Text, an image of 2x3 tokens, text, a video of 3 frames of 2x2 tokens of which 7 are kept when pruned, text.
IMAGE, VIDEO = (3, (1, 2, 3)), (12, (3, 2, 2))
MEDIA: Any = (("image", IMAGE), ("video", VIDEO))
KEPT = {"image": list(range(6)), "video": [0, 1, 2, 3, 5, 8, 11]}


def placed_media(*, pruned: bool) -> list[PlacedMedia]:
    return [
        PlacedMedia(
            modality=kind,
            offset=offset,
            length=len(KEPT[kind]) if pruned else frames * rows * columns,
            grid=(frames, 2 * rows, 2 * columns),
            seconds_per_grid=1.0 if kind == "video" else None,
        )
        for kind, (offset, (frames, rows, columns)) in MEDIA
    ]


def table(count: int, *, pruned: bool) -> Tensor:
    if not pruned:
        return initial_positions([0] * count, placed_media(pruned=False), TIMED).table_RN
    kept = [torch.tensor(KEPT[kind]) for kind in ("image", "video")]
    return pruned_positions(count, placed_media(pruned=True), kept, TIMED).table_RN


def logits(decoder: Any, embeds: Tensor, positions: Tensor, chunk: int | None) -> Tensor:
    generation = Generation(prefill_chunk=chunk, max_new_tokens=1)
    state = RequestState(request=Request(prompt="a", generation=generation))
    state.embeds, state.positions = embeds, PromptPositions(table_RN=positions, delta=torch.tensor(0))
    return generate.prefill(decoder, state).logits


def decoder_of(checkpoint: Checkpoint, recipe: str) -> TransformersDecoder:
    return TransformersDecoder(load_text_model(checkpoint, language_of(recipe), "float32"), DecoderOptions())


def embeddings(width: int, count: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("pruned", [False, True])
def test_answers_do_not_depend_on_where_chunks_end(pruned: bool) -> None:
    decoder = decoder_of(Checkpoint.open(CHECKPOINT), "qwen2_5_vl")
    count = VIDEO[0] + (len(KEPT["video"]) if pruned else 12) + 5
    embeds, positions = embeddings(decoder.width, count), table(count, pruned=pruned)
    wanted = decoder.begin(count + 1).step(embeds, positions)
    for chunk in range(1, count + 2):
        torch.testing.assert_close(
            logits(decoder, embeds, positions, chunk), wanted, atol=CHUNK_LIMIT, rtol=0
        )


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("times", [1, 2])
def test_chunks_of_the_library_s_own_size_end_anywhere(beyond, times, monkeypatch, tmp_path):
    """Under a linear rule; a chunk of 6 tokens for one of 2,048."""
    path = write_tiny_minicpmv(tmp_path / "checkpoint", Tiny(depth=1))
    decoder = decoder_of(Checkpoint.open(path), "minicpmv")
    monkeypatch.setattr(generate, "CHUNK", 6)
    count = 6 * times + beyond
    embeds, positions = embeddings(decoder.width, count), torch.arange(count)[None]
    wanted = decoder.begin(count + 1).step(embeds, positions)
    torch.testing.assert_close(logits(decoder, embeds, positions, None), wanted, atol=CHUNK_LIMIT, rtol=0)
