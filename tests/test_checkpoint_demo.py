"""Random checkpoints: complete, repeatable, and read by transformers like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny_qwen2_5_vl import SPECIAL_TOKENS, token, write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError


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
