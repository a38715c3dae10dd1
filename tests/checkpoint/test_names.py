"""Parts of checkpoints by name, tokens before and behind a connector, and the random checkpoints of demos."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vlexport.recipes.demo.writing import write_checkpoint

from tests.golden_data import FOLDER
from tests.tiny_qwen2_5_vl import SPECIAL_TOKENS, token, write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.names import ModuleMapping, shared_prefixes
from vlexport.errors import CheckpointError
from vlexport.parity.samples import random_items
from vlexport.recipe import recipe_for
from vlexport.runtime.decoder import load_text_model

# As serving systems name the parts of these families: tower, connector, language model with its output layer.
MAPPINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "kimi_vl": (
        ("vision_tower.",),
        ("multi_modal_projector.",),
        ("language_model.model.", "language_model.lm_head."),
    ),
    "minicpmv": (("vpm.",), ("resampler.",), ("llm.model.", "llm.lm_head.")),
    "nemotron_vl": (
        ("vision_model.radio_model.model.",),
        ("mlp1.",),
        ("language_model.backbone.", "language_model.lm_head."),
    ),
    "qwen2_5_vl": (("visual.",), ("visual.merger.",), ("model.", "lm_head.")),
    "qwen2_vl": (("visual.",), ("visual.merger.",), ("model.", "lm_head.")),
    "qwen3_vl": (
        ("model.visual.",),
        ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        ("model.language_model.", "lm_head."),
    ),
}


@pytest.fixture(scope="module", params=MAPPINGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = importlib.import_module(f"vlexport.recipes.demo.{request.param}").contents()
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("parts") / request.param, made, seed=0))


def part_of(mapping: ModuleMapping, name: str) -> str | None:
    """The part of a stored name: the longest of the prefixes that fit decides."""
    parts = ("tower", "connector", "language_model")
    fitting = [
        (len(prefix), part) for part in parts for prefix in getattr(mapping, part) if name.startswith(prefix)
    ]
    return max(fitting)[1] if fitting else None


def test_every_name_belongs_to_the_part_whose_class_holds_it(checkpoint: Checkpoint) -> None:
    recipe: Any = recipe_for(checkpoint)
    found = recipe.module_names(checkpoint)
    assert (found.tower, found.connector, found.language_model) == MAPPINGS[recipe.name]
    names = checkpoint.tensor_names()
    parts = {name: part_of(found, name) for name in names}
    stored = {*recipe.weight_names(checkpoint, recipe.read_config(checkpoint)).values()}
    assert {name for name in names if parts[name] in ("tower", "connector")} == stored
    body = load_text_model(checkpoint, recipe.language, "float32")
    held = sum(parameter.numel() for parameter in body.parameters())
    held += sum(buffer.numel() for name, buffer in body.named_buffers() if name.endswith("correction_bias"))
    shapes = checkpoint.shapes(tuple(found.language_model))
    assert held == sum(torch.Size(shapes[name]).numel() for name in names if parts[name] == "language_model")
    assert part_of(found, "optimizer.step") is None


def test_tokens_before_and_behind_the_connector_are_those_of_calls(checkpoint: Checkpoint) -> None:
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    packing, tower = recipe.packing(config), recipe.tower(checkpoint, "float32")
    for name in ("album", "two sizes", "one"):
        for mix in filter(None, [recipe.shape_sets(config).get(name)]):
            items = random_items(recipe, config, mix, seed=0)
            with torch.inference_mode():
                tokens = len(tower(recipe.prepare(config, items, "grouped"))["embeds"])
            rows = sum(len(item.patches) for item in items)
            if packing.queried:
                assert packing.encoder_tokens(tokens) >= rows
            else:
                assert packing.encoder_tokens(tokens) == rows


def test_counts_are_those_of_a_recorded_video() -> None:
    checkpoint = Checkpoint.open(FOLDER / "e2e_qwen2_vl" / "checkpoint")
    recipe = recipe_for(checkpoint)
    packing = recipe.packing(recipe.read_config(checkpoint))
    # Semantics of the serving system: slots times the area of a cell.
    assert packing.encoder_tokens(30) == 30 * 4


def test_names_without_a_common_beginning_are_listed_by_their_first_words() -> None:
    assert shared_prefixes(["a.x.w", "a.x.b", "a.xy.w"]) == ("a.",)
    assert shared_prefixes(["vision.w", "projector.w", "vision.b"]) == ("projector.", "vision.")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("demo") / "tiny", depth=2)


def tower_of(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(folder)
    prefix = checkpoint.resolve_prefix(("visual.", "model.visual."))
    names = [name for name in checkpoint.tensor_names() if name.startswith(prefix)]
    return checkpoint.read({name.removeprefix(prefix): name for name in names})


def load_with_report(folder: Path) -> tuple[Qwen2_5_VLForConditionalGeneration, dict[str, list[str]]]:
    """The model, and what its loader found missing, left over or misshaped."""
    # The library's types do not know that this argument changes the result.
    loaded: object = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert isinstance(loaded, tuple)
    model, report = loaded
    assert isinstance(model, Qwen2_5_VLForConditionalGeneration)
    return model, report


@pytest.mark.parametrize(("naming", "style"), [("visual.", "nested"), ("model.visual.", "flat")])
def test_transformers_loads_every_variant_completely(tmp_path: Path, naming: str, style: str) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path / "t", depth=2, shards=3, naming=naming, config_style=style)
    model, report = load_with_report(folder)
    assert not any(report.values())
    tower = tower_of(folder)
    found = model.model.visual.state_dict()
    assert set(found) == set(tower)
    assert all(torch.equal(found[name], tower[name]) for name in tower)
    config = model.config.to_dict()
    assert config["text_config"]["rope_parameters"]["mrope_section"] == [2, 3, 3]
    assert config["vision_config"]["fullatt_block_indexes"] == [1]


def test_the_tokenizer_takes_any_text_and_gives_it_back(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "<|im_start|>user\nsome text, \u00e9\u4e16\U0001f30d <|image_pad|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert [tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS] == list(
        map(token, SPECIAL_TOKENS)
    )
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_config_processor_and_tokenizer_agree(tiny: Path) -> None:
    view, tokenizer = Checkpoint.open(tiny).view, AutoTokenizer.from_pretrained(tiny)
    for key in ("image", "video"):
        assert view.require_int(f"{key}_token_id") == tokenizer.convert_tokens_to_ids(f"<|{key}_pad|>")
    assert view.require_int("text_config.eos_token_id") == tokenizer.eos_token_id
    assert len(tokenizer) <= view.require_int("text_config.vocab_size")
    assert Qwen2VLImageProcessorPil.from_pretrained(tiny).patch_size == 14


def test_weights_follow_the_seed_alone(tmp_path: Path) -> None:
    first = tower_of(write_tiny_qwen2_5_vl(tmp_path / "a", depth=1))
    again = tower_of(write_tiny_qwen2_5_vl(tmp_path / "b", depth=1, shards=5, naming="model.visual."))
    other = tower_of(write_tiny_qwen2_5_vl(tmp_path / "c", depth=1, seed=1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_weights_have_the_spread_that_shows_errors(tmp_path: Path) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path / "a", depth=1, hidden=256, heads=16, with_decoder=False)
    qkv = tower_of(folder)["blocks.0.attn.qkv.weight"]
    # 256 x 512 and 256 x 256 normal numbers: their std is known to 0.3 %.
    assert qkv[:512].std().item() == pytest.approx(2 / 16, rel=0.01)
    assert qkv[512:].std().item() == pytest.approx(1 / 16, rel=0.01)


def test_bfloat16_checkpoints_are_stored_as_such(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path / "a", depth=1, dtype="bfloat16"))
    assert {checkpoint.stored(name).dtype for name in checkpoint.tensor_names()} == {"bfloat16"}
    assert checkpoint.view.require_str("dtype") == "bfloat16"


def test_a_folder_in_use_is_not_overwritten_and_a_failed_write_leaves_nothing(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="exists already; expected a new or empty folder"):
        write_tiny_qwen2_5_vl(tiny)
    with pytest.raises(AttributeError):
        write_tiny_qwen2_5_vl(tmp_path / "a", depth=1, dtype="no such dtype")
    assert list(tmp_path.iterdir()) == []


def test_impossible_shard_counts_are_refused(tmp_path: Path) -> None:
    for shards in (0, 10_000):
        with pytest.raises(CheckpointError, match=f"{shards} shards given; expected 1 to"):
            write_tiny_qwen2_5_vl(tmp_path / "a", depth=1, shards=shards)
