"""`--lora`: an adapter in a bundle, in its manifest and name, and in whatever reads the checkpoint again."""

import json
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from tests.cli.lines import Ran, vlexport
from vlexport import Checkpoint, load
from vlexport.bundle import Bundle
from vlexport.checkpoint import Adapter
from vlexport.errors import CheckpointError, RequestError
from vlexport.recipe import find_recipe
from vlexport.runtime.opening import checkpoint_of
from vlexport.specs import MediaItem

RECIPE = find_recipe("qwen2_5_vl")


@pytest.fixture(scope="session")
def adapter(checkpoint, shared, once):
    """An adapter that PEFT made for transformers' tower, and the merged checkpoint beside it."""
    folder = shared / "adapter"

    def write():
        model = nn.Module()
        model.visual = RECIPE.reference(Checkpoint.open(checkpoint)).module
        torch.manual_seed(3)
        settings = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["qkv", "proj", "down_proj", "merger.mlp.0"],
            rank_pattern={"attn.proj": 2},
            alpha_pattern={"down_proj": 3},
            modules_to_save=["ln_q"],
            init_lora_weights=False,
        )
        adapted = get_peft_model(model, settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted.save_pretrained(folder)
        merged = adapted.merge_and_unload().state_dict()
        shutil.copytree(checkpoint, shared / "merged")
        whole = load_file(checkpoint / "model.safetensors")
        save_file(
            whole | {name: value.contiguous() for name, value in merged.items()},
            shared / "merged/model.safetensors",
        )
        return str(folder)

    return Path(once("adapter", write))


@pytest.fixture(scope="session")
def merged(adapter):
    return adapter.parent / "merged"


@pytest.fixture(scope="session")
def adapted_build(checkpoint, adapter, engines, once):
    words = ("build", checkpoint, "--lora", adapter, "--backend", "eager", "--output-dir", engines)
    return Ran(**once("adapted-build", lambda: asdict(vlexport(*words))))


@pytest.fixture(scope="session")
def adapted(adapted_build):
    assert adapted_build.code == 0, adapted_build.err
    return Path(adapted_build.lines[-1])


def origin_of(bundle):
    found = Bundle.open(bundle).manifest.checkpoint.adapter
    assert found is not None
    return found


@pytest.mark.seconds
def test_a_bundle_gives_the_tokens_of_the_model_that_peft_merged(adapted, merged, checkpoint):
    patches = torch.randn(8 * 12, 1176, generator=torch.Generator().manual_seed(1))
    item = MediaItem(kind="image", patches=patches, grid=(1, 8, 12))
    expected = RECIPE.reference(Checkpoint.open(merged)).run([item])["embeds"]
    plain = RECIPE.reference(Checkpoint.open(checkpoint)).run([item])["embeds"]
    with load(adapted) as pipeline:
        found = pipeline.encode_items([item])[0].embeds
    assert (found - expected).norm() / expected.norm() < 5e-6
    assert (plain - expected).norm() / expected.norm() > 0.1


@pytest.mark.seconds
def test_the_adapter_is_in_name_manifest_plan_and_inspect(adapted, adapter, built, checkpoint, engines):
    digest = Adapter.open(adapter).digest
    assert adapted != built
    assert (origin_of(adapted).source, origin_of(adapted).digest) == (str(adapter), digest)
    assert Bundle.open(built).manifest.checkpoint.adapter is None
    assert vlexport("inspect", adapted, "--json").document["checkpoint"]["adapter"]["digest"] == digest
    assert digest in vlexport("inspect", adapted).out
    words = ("plan", checkpoint, "--backend", "eager", "--output-dir", engines)
    found = vlexport(*words, "--lora", adapter, "--json").document
    assert (found["adapter"], found["cached"]) == ({"source": str(adapter), "digest": digest}, True)
    assert vlexport(*words, "--json").document["adapter"] is None
    assert digest[:12] in vlexport(*words, "--lora", adapter).out


@pytest.mark.slow
def test_parity_finds_the_adapter_where_it_was_or_where_it_is_given(adapted, checkpoint, tmp_path):
    place = Path(origin_of(adapted).source)
    copy = shutil.copytree(place, tmp_path / "copy")
    ran = vlexport("check", adapted, "--accuracy", "--lora", copy, "--json").ends(0)
    assert ran.document["stored"]
    found = checkpoint_of(Bundle.open(adapted)).adapter
    assert found is not None
    assert found.source == str(place)
    assert vlexport("check", adapted, "--accuracy", "--checkpoint", checkpoint).code == 3


@pytest.mark.seconds
def test_an_adapter_that_is_gone_changed_or_too_much_is_named(adapted, adapter, built, tmp_path):
    ran = vlexport("check", adapted, "--accuracy", "--lora", tmp_path / "gone").ends(2)
    assert "which cannot be read at" in ran.err
    assert "as lora" in ran.err
    other = shutil.copytree(adapter, tmp_path / "other")
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 9}))
    opened = Bundle.open(adapted)
    with pytest.raises(
        CheckpointError, match=r"was built with [0-9a-f]{12}: its files have changed.*as lora"
    ):
        checkpoint_of(opened, lora=other)
    with pytest.raises(RequestError, match=r"was built without an adapter. Leave lora out"):
        checkpoint_of(Bundle.open(built), lora=adapter)
    assert f"--lora {adapter}" in opened.rebuild_command()


def language_adapter(folder, adapter, *, alone):
    """Write an adapter of the language model too, or of that alone."""
    shutil.copytree(adapter, folder)
    kept = {} if alone else load_file(folder / "adapter_model.safetensors")
    module = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    more = {f"{module}.lora_A.weight": torch.zeros(4, 64), f"{module}.lora_B.weight": torch.zeros(64, 4)}
    save_file(kept | more, folder / "adapter_model.safetensors")
    return folder


def test_adapters_of_what_a_bundle_does_not_hold_are_refused_with_what_to_do(adapter, checkpoint, tmp_path):
    both = language_adapter(tmp_path / "both", adapter, alone=False)
    alone = language_adapter(tmp_path / "alone", adapter, alone=True)
    words = ("--backend", "eager", "--output-dir", tmp_path)
    ran = vlexport("build", checkpoint, "--lora", both, *words).ends(2)
    assert "changes 1 of 7 tensors outside the vision tower" in " ".join(ran.err.split())
    assert "language_model.layers.0.self_attn.q_proj" in ran.err
    assert "merge_and_unload" in ran.err
    ran = vlexport("plan", checkpoint, "--lora", alone, *words).ends(2)
    assert "build without lora" in " ".join(ran.err.split())


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), [("onnxruntime", "float32"), ("openvino", "float32")])
def test_stored_engines_hold_the_folded_weights(backend, dtype, adapter, checkpoint, tmp_path):
    words = ("--backend", backend, "--dtype", dtype, "--output-dir", tmp_path)
    ran = vlexport("build", checkpoint, "--lora", adapter, *words, "--json").ends(0)
    rows = {row["check"]: row for row in ran.document["parity"]["table"]["rows"]}
    assert rows["weights"]["metrics"]["wrong"] == rows["engine weights"]["metrics"]["wrong"] == 0


@pytest.mark.slow
def test_bench_times_against_the_adapted_reference(adapted):
    found = vlexport("bench", adapted, "--rounds", "1", "--size", "56x56", "--json").document
    assert max(each["relative_l2"] or 0.0 for each in found["contenders"]) < 1e-5
