"""Checkpoints that store the tower, or the language model alone, quantised: built, checked and described."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.cli.lines import bundle_of, vlexport
from tests.quantised import BLOCK, FORMATS, write_quantised
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport import Checkpoint, load
from vlexport.bundle import Bundle
from vlexport.parity.check import check
from vlexport.recipe import LanguageRule, find_recipe
from vlexport.runtime.decoder import load_text_model
from vlexport.specs import MediaItem

RECIPE = find_recipe("qwen2_5_vl")


def as_transformers_reads(stored, scale):
    """Return a weight by transformers' own operation, which takes whole blocks alone."""
    rows, columns = (-(-size // side) * side for size, side in zip(stored.shape, BLOCK, strict=True))
    whole = torch.zeros(rows, columns).to(stored.dtype)
    whole[: len(stored), : stored.shape[1]] = stored
    return Fp8Dequantize(None)._dequantize_one(whole, scale, torch.float32)[: len(stored), : stored.shape[1]]


@pytest.mark.slow
def test_a_tower_in_fp8_gives_the_tokens_of_the_weights_that_transformers_reads(checkpoint, tmp_path):
    folder = write_quantised(tmp_path / "fp8", checkpoint, "fp8")
    words = ("--backend", "eager", "--output-dir", tmp_path / "engines")
    path = bundle_of(folder, *words)
    assert Bundle.open(path).manifest.checkpoint.quantised == "fp8, 5 of 18 tensors"
    assert vlexport("inspect", path, "--json").document["checkpoint"]["quantised"] == "fp8, 5 of 18 tensors"
    assert vlexport("inspect", folder, "--json").document["quantised"].startswith("fp8, 5 of ")
    assert vlexport("plan", folder, *words, "--json").document["quantised"] == "fp8, 5 of 18 tensors"
    assert "fp8, 5 of 18 tensors" in vlexport("plan", folder, *words).out
    stored = load_file(folder / "model.safetensors")
    plain = {name: each for name, each in stored.items() if not name.endswith("_inv")}
    for name in [name for name in stored if name.endswith("_inv")]:
        weight = name.removesuffix("_scale_inv")
        plain[weight] = as_transformers_reads(stored[weight], stored[name]).contiguous()
    other = tmp_path / "plain"
    other.mkdir()
    for file in checkpoint.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    save_file(plain, other / "model.safetensors", metadata={"format": "pt"})
    patches = torch.randn(8 * 12, 1176, generator=torch.Generator().manual_seed(1))
    item = MediaItem(kind="image", patches=patches, grid=(1, 8, 12))
    expected = RECIPE.reference(Checkpoint.open(other)).run([item])["embeds"]
    with load(path) as pipeline:
        found = pipeline.encode_items([item])[0].embeds
    assert (found - expected).norm() / expected.norm() < 5e-6


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_tower_of_each_format_is_near_what_was_stored(kind, checkpoint, tmp_path):
    quantised, plain = (
        Checkpoint.open(write_quantised(tmp_path / kind, checkpoint, kind)),
        Checkpoint.open(checkpoint),
    )
    config = RECIPE.read_config(quantised)
    names = RECIPE.weight_names(quantised, config)
    assert names == RECIPE.weight_names(plain, config)
    first, before = (each.read(names, dtype="float32") for each in (quantised, plain))
    assert first.keys() == before.keys()
    for name, weight in before.items():
        if name.startswith("blocks.") and weight.ndim == 2:
            # 16 levels: half a step of the range of a group, a little more with levels that are not even.
            assert (first[name] - weight).norm() / weight.norm() < (0.05 if kind == "fp8" else 0.25)
        else:
            assert torch.equal(first[name], weight)


def test_a_quantised_language_model_leaves_tower_and_digest_as_they_are_and_is_read(checkpoint, tmp_path):
    folder = write_quantised(tmp_path / "awq", checkpoint, "awq", part=".layers.")
    ran = vlexport("plan", folder, "--backend", "eager", "--output-dir", tmp_path, "--json")
    assert (ran.code, ran.document["quantised"]) == (0, None)
    quantised, plain = Checkpoint.open(folder), Checkpoint.open(checkpoint)
    names = RECIPE.weight_names(plain, RECIPE.read_config(plain))
    assert quantised.digest(names) == plain.digest(names)
    rule = RECIPE.language
    assert isinstance(rule, LanguageRule)
    model, wanted = load_text_model(quantised, rule, "float32"), load_text_model(plain, rule, "float32")
    for (name, value), (_, other) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert (value - other).norm() <= 0.25 * other.norm(), name


def test_a_quantised_language_model_has_the_dtype_of_its_embeddings(tmp_path):
    plain = write_tiny_qwen2_5_vl(tmp_path / "half", depth=1, dtype="bfloat16")
    quantised = Checkpoint.open(write_quantised(tmp_path / "awq", plain, "awq", part=".layers."))
    rule = RECIPE.language
    assert isinstance(rule, LanguageRule)
    for dtype, wanted in ((None, torch.bfloat16), ("float32", torch.float32)):
        assert {each.dtype for each in load_text_model(quantised, rule, dtype).parameters()} == {wanted}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_bundle_of_each_format_passes_its_check_on_onnx_runtime(kind, checkpoint, tmp_path):
    folder = write_quantised(tmp_path / kind, checkpoint, kind)
    bundle = bundle_of(folder, "--backend", "onnxruntime", "--output-dir", tmp_path / "e")
    assert check(Bundle.open(bundle)).passed


@pytest.mark.slow
def test_transformers_loads_the_same_weights_from_fp8(checkpoint, tmp_path):
    from transformers import AutoModelForImageTextToText, FineGrainedFP8Config

    folder = write_quantised(tmp_path / "fp8", checkpoint, "fp8")
    settings = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_inv")]:
        weight = tensors[name.removesuffix("_scale_inv")]
        tensors[name] = torch.rand(weight.shape[0] // 16, weight.shape[1] // 16) + 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [16, 16]
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForImageTextToText.from_pretrained(
        folder, quantization_config=settings, dtype=torch.float32, local_files_only=True
    )
    quantised = Checkpoint.open(folder)
    names = RECIPE.weight_names(quantised, RECIPE.read_config(quantised))
    theirs = model.state_dict()
    for name, weight in quantised.tensors(names, dtype="float32"):
        assert torch.equal(weight, theirs[f"model.visual.{name}"]), name
