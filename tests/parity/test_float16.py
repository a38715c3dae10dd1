"""float16 where its range is not enough: parts that overflow are found, stay float32, and nothing is lost."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.slice_mixes import random_mix, relative_l2
from tests.subjects import subject_of
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.export import cast_floats, export
from vlexport._build.precision import MOST, fp32_layers_of, measure_fp32_layers
from vlexport.backends._tensorrt.backend import RECORD
from vlexport.backends._tensorrt.messages import Record
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.parity.inputs_exact import overflow_rows
from vlexport.parity.report import Row
from vlexport.parity.samples import Sample, random_items
from vlexport.recipe import find_recipe
from vlexport.specs import Precision
from vlexport.vision.tower import projections, with_fp32_layers

RECIPE = find_recipe("qwen2_5_vl")
# Inside block 0's MLP, and in the rows that block 1 gives.
SPIKED = {"blocks.0.mlp": "float32", "blocks.1": "float32", "blocks.1.mlp": "float32"}


def write_spiky(folder: Path) -> Checkpoint:
    """Weights as released towers have them: a hidden channel and six residual channels beyond 65504."""
    file = write_tiny_qwen2_5_vl(folder, depth=2, with_decoder=False) / "model.safetensors"
    tensors = load_file(file)
    block = "visual.blocks.{}.mlp.{}.weight".format
    tensors[block(0, "up_proj")][5] *= 5e4
    tensors[block(0, "down_proj")][:, 5] *= 1e-4
    tensors[block(1, "down_proj")][[3, 7, 12, 20, 33, 47]] *= 4e4
    save_file(tensors, file, metadata={"format": "pt"})
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("plain") / "tiny"
    return Checkpoint.open(str(write_tiny_qwen2_5_vl(folder, depth=2, with_decoder=False)))


@pytest.fixture(scope="module")
def spiky(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_spiky(tmp_path_factory.mktemp("spiky") / "tiny")


def overflow_row(checkpoint: Checkpoint, fp32_layers: dict[str, str]) -> Row:
    precision = Precision(dtype="float16", fp32_layers=fp32_layers)
    subject = subject_of(checkpoint, precision, "padded")
    return overflow_rows(subject, [sample_of(checkpoint)])[0]


def sample_of(checkpoint: Checkpoint) -> Sample:
    items = random_items(RECIPE, RECIPE.read_config(checkpoint), [("image", (1, 12, 20))], seed=5)
    return Sample(name="one", items=items)


def embeds(checkpoint: Checkpoint, dtype: str, fp32_layers: dict[str, str]) -> torch.Tensor:
    tower = RECIPE.tower(checkpoint, dtype, fp32_layers)
    config, sample = RECIPE.read_config(checkpoint), sample_of(checkpoint)
    with torch.inference_mode():
        found = tower(cast_floats(RECIPE.prepare(config, sample.items, "padded"), dtype))
    rows: torch.Tensor = found["embeds"]
    return rows


def test_the_parts_that_overflow_are_found_and_no_others(plain: Checkpoint, spiky: Checkpoint):
    assert measure_fp32_layers(RECIPE, plain, "padded") == {}
    assert measure_fp32_layers(RECIPE, spiky, "padded") == SPIKED


def test_with_its_fp32_layers_a_spiky_tower_keeps_every_number(spiky: Checkpoint):
    expected = embeds(spiky, "float32", {})
    naive, ours = embeds(spiky, "float16", {}), embeds(spiky, "float16", SPIKED)
    assert naive.isnan().any()
    assert ours.dtype == torch.float16
    # 0.004 measured; half precision rounds plain towers by 0.0025.
    assert (ours.float() - expected).norm() < 0.01 * expected.norm()


def test_the_report_names_the_fp32_layers_and_what_overflows_without_them(spiky: Checkpoint):
    naive, ours = overflow_row(spiky, {}), overflow_row(spiky, SPIKED)
    assert (naive.verdict, ours.verdict) == ("failed", "passed")
    assert "not finite" in naive.note
    assert "not finite" not in ours.note
    assert "blocks.0.mlp, blocks.1, blocks.1.mlp" in ours.note
    assert "blocks.0.mlp, blocks.1, blocks.1.mlp" not in naive.note


@pytest.mark.seconds
def test_every_fp32_layer_is_needed(spiky: Checkpoint):
    for lost in SPIKED:
        fp32_layers = {name: dtype for name, dtype in SPIKED.items() if name != lost}
        assert overflow_row(spiky, fp32_layers).verdict == "failed", lost


def test_only_the_first_block_of_wide_rows_is_named():
    peaks = {"blocks.2": MOST * 2, "blocks.10": MOST * 2, "blocks.1": MOST, "merger.mlp": MOST * 1.1}
    assert fp32_layers_of(peaks) == {"blocks.2": "float32", "merger.mlp": "float32"}


def test_weights_of_fp32_layers_stay_as_they_are_and_an_unknown_layer_is_refused(plain: Checkpoint):
    tower = RECIPE.tower(plain, "float32")
    # Parts are projections; norms are none.
    blocks = [f"blocks.{index}.{part}" for index in range(2) for part in ("attn", "mlp")]
    assert projections(tower) == ["patch_embed", *blocks, "merger.mlp"]
    with pytest.raises(UnsupportedError, match=r"no parts named blocks\.9 .* It has: patch_embed, blocks\.0"):
        with_fp32_layers(tower, "float16", ["blocks.9"])
    made = with_fp32_layers(RECIPE.tower(plain, "float32"), "float16", ["blocks.1.mlp"])
    types = {name: weight.dtype for name, weight in made.named_parameters()}
    wide = {name for name, dtype in types.items() if dtype == torch.float32}
    assert wide == {name for name in types if name.startswith("blocks.1.mlp.")}
    assert len(wide) == 6


def test_other_dtypes_have_no_overflow_row(plain: Checkpoint):
    assert overflow_rows(subject_of(plain, "bfloat16", "padded"), []) == []


SLICED = find_recipe("minicpmv")
SPIKED_SLICED = {
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


@pytest.mark.seconds
def test_what_overflows_is_found_and_nothing_is_lost_with_it_in_float32(checkpoint: Checkpoint):
    fp32_layers = measure_fp32_layers(SLICED, checkpoint, "padded")
    assert fp32_layers == SPIKED_SLICED
    config, reference = SLICED.read_config(checkpoint), SLICED.reference(checkpoint)
    items = random_mix(random.Random(3), config.cut, timed=config.variant.frame_times)
    inputs = cast_floats(SLICED.prepare(config, items, "padded"), "float16")
    wanted = reference.run(items)["embeds"]
    with torch.inference_mode():
        naive = SLICED.tower(checkpoint, "float16")(inputs)["embeds"]
        ours = SLICED.tower(checkpoint, "float16", fp32_layers)(inputs)["embeds"]
    assert not naive.isfinite().all()
    assert ours.dtype == torch.float16
    assert relative_l2(ours.float(), wanted) < 0.03


@pytest.mark.slow
@pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))
def test_tensorrt_builds_the_fp32_layers_of_a_sliced_tower(checkpoint: Checkpoint, tmp_path: Path):
    profile = SLICED.profiles(SLICED.read_config(checkpoint))["thumbnail"]
    graph = export(
        SLICED, checkpoint, profile=profile, dtype="float16", form="padded", fp32_layers=SPIKED_SLICED
    )
    RTX.build(graph, RTX.options(("sm89",), [profile]), tmp_path)
    found = Record.from_json((tmp_path / RECORD).read_text())
    assert [each for each in found.findings if each.wrong] == []
    # Two products of each MLP, and four of the resampler's attention.
    assert found.layers["MATRIX_MULTIPLY"]["float32"] >= 8
    assert found.layers["ATTENTION_OUTPUT"] == {"float16": 6, "float32": 3}
    assert set(found.attention.values()) == {"fused", "decomposed"}
