"""Towers of the sizes of released models, built ahead of time: minutes, 3 GB of disk, 12 GB of memory.

Random weights, so float16 needs no fp32 layer here. What was measured stands in docs/results/tensorrt.md.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from vlexport.recipes.demo.qwen2_5_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.towers import THREE_BILLION
from vlexport._build.export import export
from vlexport._build.precision import measure_fp32_layers
from vlexport.backends._tensorrt.backend import ENGINE, RECORD
from vlexport.backends._tensorrt.messages import Record
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import find_recipe

RECIPE = find_recipe("qwen2_5_vl")
DEPTH, FULL_BLOCKS = 32, 4
# Widths of the language models that read the tokens.
OUT = {"3B": 2048, "7B": 3584}
MEMORY = 24 * 2**30

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing())),
]


@pytest.fixture(scope="module", params=list(OUT))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    sizes = replace(THREE_BILLION, out=OUT[request.param], with_decoder=False)
    folder = tmp_path_factory.mktemp("full") / request.param
    return Checkpoint.open(str(write_checkpoint(folder, contents(sizes), seed=0)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_tower_of_full_size_is_built_for_two_gpus_with_two_profiles(
    checkpoint: Checkpoint, dtype: str, tmp_path: Path
):
    known = RECIPE.profiles(RECIPE.read_config(checkpoint))
    profiles = [known["image"], known["video"]]
    fp32_layers = measure_fp32_layers(RECIPE, checkpoint, "padded") if dtype == "float16" else {}
    graph = export(
        RECIPE, checkpoint, profile=profiles[0], dtype=dtype, form="padded", fp32_layers=fp32_layers
    )
    RTX.build(graph, RTX.options(("sm89", "sm120"), profiles), tmp_path)
    record = Record.from_json((tmp_path / RECORD).read_text())
    gibibytes = (record.engine_bytes / 2**30, record.peak_bytes / 2**30)
    print(f"{dtype}: {record.seconds:.0f} s, engine {gibibytes[0]:.2f} GiB, peak {gibibytes[1]:.1f} GiB")
    assert fp32_layers == {}
    assert [each for each in record.findings if each.wrong] == []
    # Patches, five products of each block, two of the merger.
    assert record.layers["MATRIX_MULTIPLY"] == {dtype: 1 + 5 * DEPTH + 2}
    # One for each block with windows, one for each shelf of a full block.
    assert record.layers["ATTENTION_OUTPUT"] == {dtype: DEPTH - FULL_BLOCKS + 3 * FULL_BLOCKS}
    assert set(record.attention.values()) == {"fused"}
    assert (tmp_path / ENGINE).stat().st_size == record.engine_bytes
    assert record.peak_bytes < MEMORY
