"""Attention over runs as one segment at a time; windows, frames, positions as recorded; work for padding."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden_data import Case, cases
from vlexport.errors import InputError
from vlexport.specs import MediaItem
from vlexport.vision import grid, rotary
from vlexport.vision.attention import kernels
from vlexport.vision.attention.kernels import segment_attention, segment_cross_attention
from vlexport.vision.attention.layout import scores, tables
from vlexport.vision.attention.layout import tables as call_tables
from vlexport.vision.attention.segmentation import Segmentation, Segments, inverse
from vlexport.vision.grid_tower import GridPacking
from vlexport.vision.preprocess import PatchRule, ResizeRule

KIND = Segmentation(name="part")

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(torch.tensor)


@given(lengths)
@settings(max_examples=50, deadline=None)
def test_no_score_is_computed_that_is_not_needed(lengths_S: torch.Tensor) -> None:
    segments = Segments(order_M=torch.arange(int(lengths_S.sum())), lengths_S=lengths_S)
    made = tables("grouped", [KIND], {"part": segments}, 1)
    assert scores("grouped", [KIND], made, 1) == {"part": int((lengths_S**2).sum())}


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=0.5)[0].transpose(0, 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_each_segment_attends_as_if_it_were_alone(sizes: list[tuple[int, int, int]]) -> None:
    """Rows among themselves, and rows to keys of their own."""
    torch.manual_seed(0)
    num_queries = [queries for count, queries, _ in sizes for _ in range(count)]
    seen = [keys for count, _, keys in sizes for _ in range(count)]
    q = torch.randn(sum(num_queries), 2, 4)
    own, (k, v) = torch.randn(2, sum(num_queries), 2, 4), torch.randn(2, sum(seen), 2, 4)
    runs = torch.tensor(sizes, dtype=torch.int32)
    found = segment_cross_attention(q, k, v, runs, 0.5)
    expected = [alone(*rows) for rows in zip(q.split(num_queries), k.split(seen), v.split(seen), strict=True)]
    # 1e-6: the same float32 kernel over other batch sizes.
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-6, rtol=0)
    found = segment_attention(q, *own, runs[:, :2], 0.5)
    expected = [alone(*rows) for rows in zip(*(each.split(num_queries) for each in (q, *own)), strict=True)]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [1, 10])
def test_products_in_bfloat16_lose_no_more_where_scores_are_large(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long segments, in parts of heads and of queries, beside one that torch's own kernel takes."""
    monkeypatch.setattr(kernels, "_multiplies_bfloat16", lambda device: device == "cpu")
    monkeypatch.setattr(kernels, "SCORES", 300 * 128)
    torch.manual_seed(0)
    q, k, v = (torch.randn(637, 3, 80) for _ in range(3))
    rows = [each.bfloat16() for each in (size * q, k, v)]
    runs = torch.tensor([[2, 300], [1, 37]], dtype=torch.int32)
    found = segment_attention(*rows, runs, 80**-0.5)
    expected = segment_attention(*(each.double() for each in rows), runs, 80**-0.5)
    # 3.8e-3 and 5.8e-3 measured; 4.5e-3 and 1.3e-2 where scores are rounded as they are.
    assert (found - expected).norm() / expected.norm() < (4.2e-3 if size == 1 else 7e-3)
    alone = segment_attention(*(each[300:600] for each in rows), runs[:1] // torch.tensor([[2, 1]]), 80**-0.5)
    assert torch.equal(found[300:600], alone)


def test_the_traced_operator_has_the_shape_and_type_of_the_queries() -> None:
    q, k = torch.randn(6, 2, 4), torch.randn(10, 2, 4)
    arguments = (q, k, k, torch.tensor([[2, 3, 5]], dtype=torch.int32), 0.5)
    torch.library.opcheck(segment_cross_attention, arguments, test_utils=("test_schema", "test_faketensor"))


PADDED_RULE = PatchRule(
    patch=14, merge=2, temporal=2, mean=(0.5,) * 3, std=(0.5,) * 3, rescale=1 / 255, resample=3,
    image=ResizeRule(min_pixels=1, max_pixels=1), video=ResizeRule(min_pixels=1, max_pixels=1),
)  # fmt: skip


def media_of(grids_I3: torch.Tensor) -> list[MediaItem]:
    return [MediaItem(kind="video", patches=torch.empty(0), grid=tuple(grid)) for grid in grids_I3.tolist()]


def tables_of(grids_I3: torch.Tensor, side: int) -> dict[str, torch.Tensor]:
    packing = GridPacking(PADDED_RULE, window_side=side)
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
        packing, items = GridPacking(PADDED_RULE, window_side=4), media_of(grids_I3)
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


def recorded(kind: str) -> list[Case]:
    found = list(cases("q25_metadata", kind))
    assert len(found) >= 24
    return found


def side(meta: dict[str, int]) -> int:
    return meta["window_size"] // meta["merge"] // meta["patch"]


def deduplicated(boundaries: torch.Tensor) -> list[int]:
    found: list[int] = boundaries.unique_consecutive().tolist()
    return found


def test_window_order_and_lengths_equal_the_recorded_ones() -> None:
    for case in recorded("window"):
        found = grid.windows(torch.tensor([case.meta["thw"]]), case.meta["merge"], side(case.meta))
        unit = case.meta["merge"] ** 2
        assert found.order_M.tolist() == case.outputs["window_index"].tolist(), case.meta
        assert (found.lengths_S.cumsum(0) * unit).tolist() == case.outputs["cu_window"].tolist(), case.meta


def test_tables_of_several_items_equal_the_recorded_ones() -> None:
    for case in recorded("metadata"):
        grids_I3, merge = torch.tensor(case.meta["grids"]), case.meta["merge"]
        found = grid.windows(grids_I3, merge, side(case.meta))
        unit = merge**2
        assert found.order_M.tolist() == case.outputs["window_index"].tolist(), case.meta
        assert inverse(found.order_M).tolist() == case.outputs["reverse_indices"].tolist(), case.meta
        windows = F.pad((found.lengths_S * unit).cumsum(0), (1, 0))
        assert windows.tolist() == deduplicated(case.outputs["cu_window_seqlens"]), case.meta
        frames = F.pad((grid.frames(grids_I3, merge).lengths_S * unit).cumsum(0), (1, 0))
        assert frames.tolist() == deduplicated(case.outputs["cu_seqlens"]), case.meta


def test_rotary_tables_equal_the_recorded_ones() -> None:
    found = [case for case in recorded("metadata") if "rotary_pos_emb_cos" in case.outputs]
    assert len(found) == 11
    for case in found:
        grids_I3, merge = torch.tensor(case.meta["grids"]), case.meta["merge"]
        order = grid.windows(grids_I3, merge, side(case.meta)).order_M
        frequencies = rotary.inverse_frequencies(case.meta["head_dim"], 10000.0)
        angles = rotary.angles(grid.patch_positions(grids_I3, merge), frequencies)
        angles = angles.unflatten(0, (-1, merge**2))[order].flatten(0, 1)
        # 1e-6: the recorded tables are looked up, ours are computed; both in float32.
        torch.testing.assert_close(angles.cos(), case.outputs["rotary_pos_emb_cos"], atol=1e-6, rtol=0)
        torch.testing.assert_close(angles.sin(), case.outputs["rotary_pos_emb_sin"], atol=1e-6, rtol=0)


def test_grids_that_no_tower_can_serve_are_refused() -> None:
    odd = "rows and columns must be multiples of the merge size 2; resize to [1, 4, 6]"
    shape = "integers of shape [items, 3] expected"
    for grids_I3, message in (
        (torch.tensor([[1, 4, 5]]), odd),
        (torch.tensor([[0, 4, 4]]), "every side must be at least 1"),
        (torch.tensor([[1.0, 4.0, 4.0]]), shape),
        (torch.tensor([1, 4, 4]), shape),
        (torch.zeros(0, 3, dtype=torch.int64), "no image or video given"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            grid.check_grids(grids_I3, 2)
