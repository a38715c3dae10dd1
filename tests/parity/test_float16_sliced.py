"""float16 of sliced towers whose weights overflow it: blocks, residual rows, the resampler's attention."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.slice_mixes import random_mix, relative_l2
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport._build.export import cast_floats, export
from vlexport._build.precision import measure_fp32_layers
from vlexport.backends._tensorrt.backend import RECORD
from vlexport.backends._tensorrt.messages import Record
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import find_recipe

RECIPE = find_recipe("minicpmv")
SPIKED = {
    "blocks.0.mlp": "float32",
    "blocks.1": "float32",
    "blocks.1.mlp": "float32",
    "resampler.attn": "float32",
}
LAYERS = {"2.0": "vpm.blocks.{}", "2.6": "vpm.encoder.layers.{}", "4.5": "vpm.encoder.layers.{}"}


@pytest.fixture(scope="module", params=sorted(LAYERS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("spiky") / "tiny"
    write_tiny_minicpmv(folder, Tiny(version=request.param, depth=2, with_decoder=False))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    mlp = (LAYERS[request.param] + ".mlp.{}.{}").format
    # A hidden channel, six channels of the rows, a channel of the resampler's values.
    for kind in ("weight", "bias"):
        tensors[mlp(0, "fc1", kind)][5] *= 1e5
        tensors[mlp(1, "fc2", kind)][[3, 7, 12, 20, 27, 30]] *= 1e5
        tensors[f"resampler.attn.in_proj_{kind}"][-5] *= 2e5
    tensors[mlp(0, "fc2", "weight")][:, 5] *= 1e-5
    tensors["resampler.attn.out_proj.weight"][:, -5] *= 5e-6
    save_file(tensors, file, metadata={"format": "pt"})
    return Checkpoint.open(str(folder))


def test_what_overflows_is_found_and_nothing_is_lost_with_it_in_float32(checkpoint: Checkpoint):
    fp32_layers = measure_fp32_layers(RECIPE, checkpoint, "padded")
    assert fp32_layers == SPIKED
    config, reference = RECIPE.read_config(checkpoint), RECIPE.reference(checkpoint)
    items = random_mix(random.Random(3), config.cut, timed=config.variant.frame_times)
    inputs = cast_floats(RECIPE.prepare(config, items, "padded"), "float16")
    wanted = reference.run(items)["embeds"]
    with torch.inference_mode():
        naive = RECIPE.tower(checkpoint, "float16")(inputs)["embeds"]
        ours = RECIPE.tower(checkpoint, "float16", fp32_layers)(inputs)["embeds"]
    assert not naive.isfinite().all()
    assert ours.dtype == torch.float16
    assert relative_l2(ours.float(), wanted) < 0.03


@pytest.mark.slow
@pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))
def test_tensorrt_builds_the_fp32_layers_of_a_sliced_tower(checkpoint: Checkpoint, tmp_path: Path):
    profile = RECIPE.profiles(RECIPE.read_config(checkpoint))["thumbnail"]
    graph = export(RECIPE, checkpoint, profile=profile, dtype="float16", form="padded", fp32_layers=SPIKED)
    RTX.build(graph, RTX.options(("sm89",), [profile]), tmp_path)
    found = Record.from_json((tmp_path / RECORD).read_text())
    assert [each for each in found.findings if each.wrong] == []
    # Two products of each MLP, and four of the resampler's attention.
    assert found.layers["MATRIX_MULTIPLY"]["float32"] >= 8
    assert found.layers["ATTENTION_OUTPUT"] == {"float16": 6, "float32": 3}
    assert set(found.attention.values()) == {"fused", "decomposed"}
