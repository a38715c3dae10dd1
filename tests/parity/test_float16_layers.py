"""float16 where its range is not enough: parts that overflow are found, stay float32, and nothing is lost."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._export import cast_floats
from vlexport.build_spec import BuildSpec
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.parity.exact import overflow_rows
from vlexport.parity.samples import Sample, random_items
from vlexport.precision import MOST, fp32_layers_of, measure_fp32_layers
from vlexport.recipe import find_recipe
from vlexport.specs import Precision
from vlexport.vision.fp32_layers import projections, with_fp32_layers

RECIPE = find_recipe("qwen2_5_vl")
# Inside block 0's MLP, and in the rows that block 1 gives.
SPIKED = {"blocks.0.mlp": "float32", "blocks.1": "float32", "blocks.1.mlp": "float32"}


def write_spikes(checkpoint: Path) -> None:
    """Weights as released towers have them: a hidden channel and six residual channels beyond 65504."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    block = "visual.blocks.{}.mlp.{}.weight".format
    tensors[block(0, "up_proj")][5] *= 5e4
    tensors[block(0, "down_proj")][:, 5] *= 1e-4
    tensors[block(1, "down_proj")][[3, 7, 12, 20, 33, 47]] *= 4e4
    save_file(tensors, file, metadata={"format": "pt"})


def tiny(folder: Path, *, spiky: bool) -> Checkpoint:
    path = write_tiny_qwen2_5_vl(folder / "tiny", depth=2, with_decoder=False)
    if spiky:
        write_spikes(path)
    return Checkpoint.open(str(path))


def subject_of(checkpoint: Checkpoint, fp32_layers: dict[str, str]) -> BuildSpec:
    config = RECIPE.read_config(checkpoint)
    return BuildSpec(
        recipe=RECIPE,
        config=config,
        checkpoint=checkpoint,
        form="padded",
        precision=Precision(dtype="float16", fp32_layers=fp32_layers),
        profile=next(iter(RECIPE.profiles(config).values())),
        tensors=RECIPE.stored_tensors(checkpoint, config),
    )


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


def test_plain_weights_need_no_fp32_layers(tmp_path: Path):
    assert measure_fp32_layers(RECIPE, tiny(tmp_path, spiky=False), "padded") == {}


def test_the_parts_that_overflow_are_found_and_no_others(tmp_path: Path):
    assert measure_fp32_layers(RECIPE, tiny(tmp_path, spiky=True), "padded") == SPIKED


def test_with_its_fp32_layers_a_spiky_tower_keeps_every_number(tmp_path: Path):
    checkpoint = tiny(tmp_path, spiky=True)
    expected = embeds(checkpoint, "float32", {})
    naive, ours = embeds(checkpoint, "float16", {}), embeds(checkpoint, "float16", SPIKED)
    assert naive.isnan().any()
    assert ours.dtype == torch.float16
    # 0.004 measured; half precision rounds plain towers by 0.0025.
    assert (ours.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(
    ("fp32_layers", "verdict"), [({}, "failed"), (SPIKED, "passed")], ids=["naive", "ours"]
)
def test_the_report_names_the_fp32_layers_and_what_overflows_without_them(
    tmp_path: Path, fp32_layers, verdict: str
):
    checkpoint = tiny(tmp_path, spiky=True)
    row = overflow_rows(subject_of(checkpoint, fp32_layers), [sample_of(checkpoint)])[0]
    assert row.verdict == verdict
    assert ("blocks.0.mlp, blocks.1, blocks.1.mlp" in row.note) == bool(fp32_layers)
    assert ("not finite" in row.note) == (not fp32_layers)


@pytest.mark.parametrize("lost", sorted(SPIKED))
def test_every_fp32_layer_is_needed(tmp_path: Path, lost: str):
    checkpoint = tiny(tmp_path, spiky=True)
    fp32_layers = {name: dtype for name, dtype in SPIKED.items() if name != lost}
    assert overflow_rows(subject_of(checkpoint, fp32_layers), [sample_of(checkpoint)])[0].verdict == "failed"


def test_only_the_first_block_of_wide_rows_is_named():
    peaks = {"blocks.2": MOST * 2, "blocks.10": MOST * 2, "blocks.1": MOST, "merger.mlp": MOST * 1.1}
    assert fp32_layers_of(peaks) == {"blocks.2": "float32", "merger.mlp": "float32"}


def test_weights_of_fp32_layers_stay_as_they_are(tmp_path: Path):
    checkpoint = tiny(tmp_path, spiky=False)
    tower = with_fp32_layers(RECIPE.tower(checkpoint, "float32"), "float16", ["blocks.1.mlp"])
    types = {name: weight.dtype for name, weight in tower.named_parameters()}
    wide = {name for name, dtype in types.items() if dtype == torch.float32}
    assert wide == {name for name in types if name.startswith("blocks.1.mlp.")}
    assert len(wide) == 6


def test_parts_are_projections_and_norms_are_none(tmp_path: Path):
    tower = RECIPE.tower(tiny(tmp_path, spiky=False), "float32")
    blocks = [f"blocks.{index}.{part}" for index in range(2) for part in ("attn", "mlp")]
    assert projections(tower) == ["patch_embed", *blocks, "merger.mlp"]


def test_an_unknown_part_is_refused_with_the_known_ones(tmp_path: Path):
    tower = RECIPE.tower(tiny(tmp_path, spiky=False), "float32")
    with pytest.raises(UnsupportedError, match=r"no parts named blocks\.9 .* It has: patch_embed, blocks\.0"):
        with_fp32_layers(tower, "float16", ["blocks.9"])


def test_other_dtypes_have_no_overflow_row(tmp_path: Path):
    checkpoint = tiny(tmp_path, spiky=False)
    assert overflow_rows(replace(subject_of(checkpoint, {}), precision=Precision(dtype="bfloat16")), []) == []
