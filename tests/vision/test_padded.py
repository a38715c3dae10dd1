"""The padded layout: the same tower output as the reference, and padded work that is counted."""

from __future__ import annotations

import math

import pytest
import torch

from tests.golden_towers import items_of, sharp_weights, write_recorded_tower
from vlexport._export import export
from vlexport.checkpoint import Checkpoint
from vlexport.graph import Graph
from vlexport.recipe import find_recipe
from vlexport.specs import MediaItem
from vlexport.vision.attention.layout import tables as call_tables
from vlexport.vision.grid_packing import GridPacking
from vlexport.vision.preprocess import PatchRule, ResizeRule

RECIPE = find_recipe("qwen2_5_vl")
MIXES = [
    [[1, 10, 18], [2, 12, 6], [1, 6, 8]],
    [[1, 2, 2]],
    [[1, 2, 60], [1, 60, 2]],
    [[5, 4, 6], [1, 30, 22], [1, 8, 8], [3, 16, 16]],
    [[1, 6, 6]] * 9 + [[1, 24, 30]],
]
# parity.md 5, float32.
RELATIVE_L2, WORST_TOKEN = 1e-5, 5e-5

RULE = PatchRule(
    patch=14, merge=2, temporal=2, mean=(0.5,) * 3, std=(0.5,) * 3, rescale=1 / 255, resample=3,
    image=ResizeRule(min_pixels=1, max_pixels=1), video=ResizeRule(min_pixels=1, max_pixels=1),
)  # fmt: skip


def media_of(grids_I3: torch.Tensor) -> list[MediaItem]:
    return [MediaItem(kind="video", patches=torch.empty(0), grid=tuple(grid)) for grid in grids_I3.tolist()]


def tables_of(grids_I3: torch.Tensor, side: int) -> dict[str, torch.Tensor]:
    packing = GridPacking(RULE, window_side=side)
    return call_tables("padded", packing.segmentations, packing.segments(media_of(grids_I3)), packing.unit)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("rows")
    return Checkpoint.open(write_recorded_tower(folder, 0, sharp_weights(0, seed=3)))


@pytest.fixture(scope="module")
def graph(checkpoint: Checkpoint) -> Graph:
    return export(RECIPE, checkpoint, form="padded")


@pytest.mark.slow
def test_the_program_serves_every_mix_like_transformers(graph: Graph, checkpoint: Checkpoint) -> None:
    program, reference = graph.program.module(), RECIPE.reference(checkpoint)
    for seed, mix in enumerate(MIXES):
        patches = sum(math.prod(each) for each in mix)
        noise = torch.randn(patches, 96, generator=torch.Generator().manual_seed(seed))
        items = items_of(noise, mix)
        with torch.inference_mode():
            found = program(RECIPE.prepare(graph.config, items, "padded"))["embeds"].double()
        expected = reference.run(items)["embeds"].double()
        assert float((found - expected).norm() / expected.norm()) < RELATIVE_L2
        assert float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < WORST_TOKEN


# How much more than is needed the frames' shelves compute.
WORK: list[tuple[list[list[int]], float]] = [
    ([[1, 32, 32]], 1.0),
    ([[8, 32, 32]], 1.0),
    ([[1, 10, 14]] * 64, 1.0),
    ([[1, 92, 66]] + [[1, 6, 6]] * 8, 1.0),
    ([[1, 36, 52], [1, 10, 14], [1, 22, 30], [1, 8, 8], [4, 18, 24]], 1.08),
    ([[1, 128, 128]] + [[1, 12, 18]] * 40, 1.0),
    ([[16, 50, 90]], 1.0),
]


def test_attention_work_is_the_ideal_in_runs_and_little_more_where_it_is_padded() -> None:
    for mix, most in WORK:
        grids_I3 = torch.tensor(mix)
        tables = tables_of(grids_I3, 4)
        packing, items = GridPacking(RULE, window_side=4), media_of(grids_I3)
        ideal, counted = (packing.attention_work(items, layout) for layout in ("grouped", "padded"))
        assert all(computed == needed for computed, needed in ideal.values()), mix
        empty_buckets = 2 * 4**2  # at most two, each a row of one cell
        assert counted["frame"][0] <= most * counted["frame"][1] + empty_buckets, mix
        assert counted["window"][0] <= 1.35 * counted["window"][1], mix
        assert len(tables["order"]) <= 1.02 * len(tables["inverse"]), mix


def test_no_input_grows_with_the_square_of_a_frame() -> None:
    small = tables_of(torch.tensor([[1, 64, 64]]), 4)
    large = tables_of(torch.tensor([[1, 128, 128]]), 4)
    assert all(large[name].numel() <= 4 * small[name].numel() for name in small)
