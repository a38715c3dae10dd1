"""Sliced towers without runs: on shelves, between bounds in calls of fixed sizes, as TensorRT networks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.backends.towers import RELATIVE_L2, WORST_TOKEN, errors
from tests.slice_mixes import random_mix
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from vlexport._build.export import export
from vlexport.backends import EngineSpec, Folder, Options, find_backend
from vlexport.backends._tensorrt.backend import RECORD
from vlexport.backends._tensorrt.messages import Record
from vlexport.backends.cudagraphs import captured_calls, sizes_of
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.checkpoint import Checkpoint
from vlexport.parity.tables import check_tables
from vlexport.recipe import find_recipe
from vlexport.vision.attention.layout import LAYOUTS

RECIPE = find_recipe("minicpmv")
DTYPES = ("float32", "bfloat16", "float16")
TARGETS = ("sm86", "sm89", "sm120")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("sliced")
    return {
        version: Checkpoint.open(
            write_tiny_minicpmv(folder / version, Tiny(version=version, with_decoder=False))
        )
        for version in VERSIONS
    }


@pytest.mark.seconds
@pytest.mark.parametrize("version", VERSIONS)
def test_every_form_equals_one_slice_at_a_time(checkpoints, version: str) -> None:
    checkpoint = checkpoints[version]
    config, reference = RECIPE.read_config(checkpoint), RECIPE.reference(checkpoint)
    tower, source = RECIPE.tower(checkpoint, "float32"), random.Random(5)
    for _ in range(40):
        items = random_mix(source, config.cut, timed=config.variant.frame_times)
        wanted = reference.run(items)["embeds"]
        for form in LAYOUTS:
            inputs = RECIPE.prepare(config, items, form)
            assert not any(check_tables(inputs, items, RECIPE.packing(config)).values())
            with torch.inference_mode():
                assert_equal(tower(inputs)["embeds"], wanted)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    relative, worst = errors(found, wanted)
    assert relative < RELATIVE_L2
    assert worst < WORST_TOKEN


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.0", "4.5"])
def test_padded_calls_of_fixed_sizes_give_the_rows_of_the_call(checkpoints, version: str, tmp_path) -> None:
    checkpoint = checkpoints[version]
    graph = export(RECIPE, checkpoint, form="cu_seqlens")
    find_backend("cudagraphs").build(graph, Options(), tmp_path)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    sizes = [each for each in sizes_of(graph) if each["groups"] <= 64]
    calls = captured_calls(Folder(tmp_path), sizes, spec, "cpu")
    queries = graph.config.tower.queries
    assert list(calls.budgets) == sorted({queries * each["groups"] for each in sizes})
    source, reference = random.Random(2), RECIPE.reference(checkpoint)
    for _ in range(8):
        items = random_mix(source, graph.config.cut, timed=graph.config.variant.frame_times)
        found = calls.run(RECIPE.prepare(graph.config, items, "cu_seqlens"))["embeds"]
        assert_equal(found, reference.run(items)["embeds"])
    assert (calls.num_replays, calls.num_as_they_are) == (8, 0)


@pytest.mark.slow
@pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", VERSIONS)
def test_tensorrt_builds_what_the_program_has(checkpoints, version: str, dtype: str, tmp_path: Path) -> None:
    checkpoint = checkpoints[version]
    known = RECIPE.profiles(RECIPE.read_config(checkpoint))
    profiles = [known["thumbnail"], known["image"]]
    graph = export(RECIPE, checkpoint, profile=profiles[0], dtype=dtype, form="padded")
    RTX.build(graph, RTX.options(TARGETS, profiles), tmp_path)
    found = Record.from_json((tmp_path / RECORD).read_text())
    assert [each for each in found.findings if each.wrong] == []
    depth = graph.config.tower.depth
    # Three shelves of slices in every block, three of groups behind them; three norms are the resampler's.
    assert found.layers["ATTENTION_OUTPUT"] == {dtype: 3 * depth + 3}
    assert found.layers["NORMALIZATION"] == {"float32": 2 * depth + 4}
    assert set(found.attention.values()) == {"decomposed" if dtype == "float32" else "fused"}
    assert set(found.profiles) == {"thumbnail", "image"}
