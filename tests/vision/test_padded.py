"""The padded layout: the same tower output as the reference, and padded work that is counted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden_towers import items_of, sharp_weights, write_recorded_tower
from vlexport._export import export
from vlexport.checkpoint import Checkpoint
from vlexport.graph import Graph
from vlexport.recipe import find_recipe
from vlexport.specs import MediaItem
from vlexport.vision import grid
from vlexport.vision.attention.layout import tables as call_tables
from vlexport.vision.attention.padded import BUCKETS
from vlexport.vision.grid_tower import GridPacking
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

grids = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)).map(
        lambda sides: [sides[0], 2 * sides[1], 2 * sides[2]]
    ),
    min_size=1,
    max_size=5,
).map(torch.tensor)


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


@given(grids, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_cell_has_one_slot_beside_cells_of_its_window_only(grids_I3: torch.Tensor, side: int) -> None:
    tables = tables_of(grids_I3, side)
    slots, order, unit = tables["inverse"].long(), tables["order"].long(), 4
    assert len(slots.unique()) == len(slots)
    assert order[slots].tolist() == list(range(len(slots)))
    windows = grid.windows(grids_I3, 2, side)
    number = torch.empty_like(slots)
    number[windows.order_M] = torch.repeat_interleave(torch.arange(len(windows.lengths_S)), windows.lengths_S)
    segments = tables["window_segments"].flatten()[::unit]
    assert segments[slots].tolist() == number.tolist()
    assert int((segments >= 0).sum()) == len(slots)
    row = slots // side**2
    for window in range(len(windows.lengths_S)):
        assert len(row[number == window].unique()) == 1


@given(grids, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_frame_has_one_row_of_its_own(grids_I3: torch.Tensor, side: int) -> None:
    tables = tables_of(grids_I3, side)
    frame_M = grid.cells(grids_I3, 2).frame_M
    slots = tables["inverse"].long()
    cell_of_slot = {slot: cell for cell, slot in enumerate(slots.tolist())}
    places = torch.cat([tables[f"frame_cells_{bucket}"].flatten() for bucket in BUCKETS])
    assert places[tables["frame_places"].long()[slots]].tolist() == slots.tolist()
    seen = []
    for bucket in BUCKETS:
        cells, counts = tables[f"frame_cells_{bucket}"], tables[f"frame_counts_{bucket}"]
        for row, count in zip(cells.tolist(), counts.tolist(), strict=True):
            if count % 4 == 0:
                inside = [cell_of_slot[slot] for slot in row[: count // 4]]
                assert len({int(frame_M[cell]) for cell in inside}) == 1
                seen += inside
    assert sorted(seen) == list(range(len(slots)))


@pytest.mark.parametrize(
    ("mix", "most"),
    [
        ([[1, 32, 32]], 1.0),
        ([[8, 32, 32]], 1.0),
        ([[1, 10, 14]] * 64, 1.0),
        ([[1, 92, 66]] + [[1, 6, 6]] * 8, 1.0),
        ([[1, 36, 52], [1, 10, 14], [1, 22, 30], [1, 8, 8], [4, 18, 24]], 1.08),
        ([[1, 128, 128]] + [[1, 12, 18]] * 40, 1.0),
        ([[16, 50, 90]], 1.0),
    ],
)
def test_full_attention_work_stays_near_the_ideal(mix: list[list[int]], most: float) -> None:
    grids_I3 = torch.tensor(mix)
    tables = tables_of(grids_I3, 4)
    counted = GridPacking(RULE, window_side=4).attention_work(media_of(grids_I3), "padded")
    empty_buckets = 2 * 4**2  # at most two, each a row of one cell
    assert counted["frame"][0] <= most * counted["frame"][1] + empty_buckets
    assert counted["window"][0] <= 1.35 * counted["window"][1]
    assert len(tables["order"]) <= 1.02 * len(tables["inverse"])


def test_no_input_grows_with_the_square_of_a_frame() -> None:
    small = tables_of(torch.tensor([[1, 64, 64]]), 4)
    large = tables_of(torch.tensor([[1, 128, 128]]), 4)
    assert all(large[name].numel() <= 4 * small[name].numel() for name in small)
