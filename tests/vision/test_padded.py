"""The padded layout: work for padding is little and counted; tests/reference judges its tables."""

from __future__ import annotations

import torch

from vlexport.specs import MediaItem
from vlexport.vision.attention.layout import tables as call_tables
from vlexport.vision.grid_tower import GridPacking
from vlexport.vision.preprocess import PatchRule, ResizeRule

RULE = PatchRule(
    patch=14, merge=2, temporal=2, mean=(0.5,) * 3, std=(0.5,) * 3, rescale=1 / 255, resample=3,
    image=ResizeRule(min_pixels=1, max_pixels=1), video=ResizeRule(min_pixels=1, max_pixels=1),
)  # fmt: skip


def media_of(grids_I3: torch.Tensor) -> list[MediaItem]:
    return [MediaItem(kind="video", patches=torch.empty(0), grid=tuple(grid)) for grid in grids_I3.tolist()]


def tables_of(grids_I3: torch.Tensor, side: int) -> dict[str, torch.Tensor]:
    packing = GridPacking(RULE, window_side=side)
    segments = packing.segments({"grids": grids_I3})
    return call_tables("padded", packing.segmentations, segments, packing.unit)


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
