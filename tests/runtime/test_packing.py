"""Packing into calls: one tensor of rows in and one out, budgets, bounds of windows, captured buffers."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.devices import GPU, stand_in
from tests.golden_data import cases
from tests.runtime.made import image, video
from tests.runtime.recorded import TRUTHS, recorded
from vlexport.backends import Engine
from vlexport.errors import InputError, LimitError
from vlexport.runtime import encoder
from vlexport.runtime.encoder import Encoder, EncoderOptions, EncoderOutput, EngineSession, budget_of, pack
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import EncoderInput
from vlexport.specs import MediaItem, Range
from vlexport.vision import static_shapes


def test_packing_equals_the_reference():
    found = list(cases("cudagraph", "packing"))
    assert len(found) == 60
    for case in found:
        tokens, budgets = case.inputs["tokens"].tolist(), case.meta["budgets"]
        ours = pack(tokens, budgets, case.meta["max_batch_size"])
        totals = [sum(tokens[item] for item in batch) for batch in ours]
        assert [
            [batch, budget_of(total, budgets)] for batch, total in zip(ours, totals, strict=True)
        ] == case.meta["batches"]


def test_window_bounds_equal_the_reference():
    found = list(cases("q25_metadata", "max_window_seqs"))
    assert len(found) == 30
    for case in found:
        side = case.meta["window_size"] // case.meta["merge"] // case.meta["patch"]
        budget, items, frames = case.meta["args"]
        assert static_shapes.max_windows(budget, items, frames, side) == int(case.outputs["n"])


def test_boundaries_are_refilled_like_the_reference():
    found = list(cases("q25_metadata", "pad_cu"))
    assert len(found) == 12
    for case in found:
        recorded = case.outputs["dst"]
        buffer = torch.full_like(recorded, -7)
        static_shapes.refill(buffer, case.inputs["src"], "repeat_last")
        assert torch.equal(buffer, recorded)


def test_budgets_double_and_end_at_the_largest():
    assert static_shapes.doubling(3, 20) == (3, 6, 12, 20)
    assert static_shapes.doubling(5, 20) == (5, 10, 20)
    assert static_shapes.doubling(7, 7) == (7,)


def test_packing_keeps_every_item_once_inside_its_limits():
    random_number = random.Random(0)
    for _ in range(400):
        tokens = [random_number.randint(1, 1200) for _ in range(random_number.randint(0, 15))]
        budgets = static_shapes.doubling(random_number.randint(1, 64), 1000)
        max_items = random_number.randint(1, 6)
        batches = pack(tokens, budgets, max_items)
        assert sorted(item for batch in batches for item in batch) == list(range(len(tokens)))
        for batch in batches:
            total = sum(tokens[item] for item in batch)
            assert len(batch) <= max_items
            assert budget_of(total, budgets) is not None or (len(batch) == 1 and total > 1000)


def test_a_window_bound_covers_every_frame_shape():
    random_number = random.Random(3)
    for _ in range(2000):
        shapes = [[random_number.randint(1, high) for high in (4, 30, 30)] for _ in range(3)]
        tokens = sum(t * rows * columns for t, rows, columns in shapes)
        found = sum(t * -(-rows // 4) * -(-columns // 4) for t, rows, columns in shapes)
        assert found <= static_shapes.max_windows(tokens, 3, sum(shape[0] for shape in shapes), 4)


def test_buffers_are_padded_with_zeros():
    buffer = torch.full((4, 2), 9.0)
    static_shapes.refill(buffer, torch.ones(3, 2), "zero")
    assert buffer.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    scalar = torch.tensor(3)
    static_shapes.refill(scalar, torch.tensor(8), "zero")
    assert int(scalar) == 8


@pytest.mark.parametrize(("smallest", "largest"), [(0, 5), (-1, 4), (9, 8)])
def test_an_impossible_range_is_refused(smallest, largest):
    with refused(f"budgets {smallest} to {largest}: expected 1 <= smallest <= largest."):
        static_shapes.doubling(smallest, largest)


def refused(fragment):
    return pytest.raises(InputError, match=re.escape(fragment))


def test_rows_that_do_not_fit_are_refused():
    with refused("4 rows given, the buffer holds 3; use a larger budget."):
        static_shapes.refill(torch.zeros(3), torch.zeros(4), "zero")
    with refused("no boundaries given: at least the leading 0 is expected."):
        static_shapes.refill(torch.zeros(3), torch.zeros(0), "repeat_last")


def test_equal_rows_of_one_memory_reach_a_device():
    with stand_in():
        moved = static_shapes.to_device(torch.arange(3).expand(3, 3), GPU)
    assert (moved.device, moved.tolist()) == (GPU, [[0, 1, 2]] * 3)


# Absolute; tests/golden/e2e/README.md has where it comes from.
RECORDED = 1e-4
# Calls of other heights round matrix products differently: 1e-6 here, on values around 1.
ROUNDING = 1e-5
SEEN = [case["name"] for case in TRUTHS if case["media"] and not case["embeds"]]


def items(name: str) -> tuple[list[MediaItem], Tensor]:
    """The media of a recorded request, and the rows that its tower gave."""
    one = recorded(name)
    kinds = one.case["media_order"]
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    patches = [one.tensors[f"media{at}.{names[kind]}"] for at, kind in enumerate(kinds)]
    media = [
        MediaItem(kind=kind, patches=rows, grid=one.grid(at))
        for at, (kind, rows) in enumerate(zip(kinds, patches, strict=True))
    ]
    return media, torch.cat([one.tensors[f"media{at}.tower_out"] for at in range(len(kinds))])


def packed(tower: EngineSession, media: list[MediaItem]) -> Tensor:
    patches, cells = torch.cat([item.patches for item in media]), [item.cells for item in media]
    return tower.run_packed(patches, [item.grid for item in media], cells)


def with_range(tower: EngineSession, symbol: str, most: int) -> EngineSession:
    """The same tower, its engine held to a profile that ends sooner."""
    spec = tower.engine.spec
    ranges = {
        each: Range(1, 1, most) if each.name == symbol else known
        for each, known in spec.profile.ranges.items()
    }
    assert ranges != spec.profile.ranges, f"no symbol {symbol}: {sorted(map(str, ranges))}"
    assert tower.engine._runner is not None
    smaller = replace(spec, profile=replace(spec.profile, ranges=ranges))
    return EngineSession(tower.bundle, Engine(tower.engine._runner, smaller), tower.recipe)


MIXED = (image(0), video(1), image(2, 112, 56), video(3, 5, 84, 84))


@pytest.fixture
def mixed(opened: Pipeline) -> list[MediaItem]:
    return [opened.preprocess(each) for each in MIXED]


@pytest.mark.seconds
def test_rows_equal_those_of_items_and_the_recorded_ones(answering: Pipeline, subtests) -> None:
    for name in SEEN:
        with subtests.test(name):
            media, expected = items(name)
            rows = packed(answering.session, media)
            assert torch.equal(rows, torch.cat([each.embeds for each in answering.encode_items(media)]))
            torch.testing.assert_close(rows, expected, atol=RECORDED, rtol=0)


def test_tables_are_made_once_for_a_mix_of_grids_and_patches_reach_the_engine_as_they_lie(
    opened: Pipeline, mixed: list[MediaItem], monkeypatch
) -> None:
    tower = EngineSession(opened.bundle, opened.engine, opened.recipe)
    patches, grids = torch.cat([item.patches for item in mixed]), [list(item.grid) for item in mixed]
    seen: list[dict[str, Tensor]] = []
    run = tower.engine.run

    def watched(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(inputs)
        return run(inputs)

    monkeypatch.setattr(tower.engine, "run", watched)
    first, second = tower.run_packed(patches, grids), tower.run_packed(patches, grids)
    assert torch.equal(first, second)
    assert [inputs["patches"].data_ptr() for inputs in seen] == [patches.data_ptr()] * 2
    assert all(seen[0][name] is seen[1][name] for name in seen[0] if name != "patches")


def test_rows_of_some_cells_are_those_of_items_however_they_are_cut(opened: Pipeline, mixed) -> None:
    first, *others = mixed
    parts = [first]
    for item in others:
        kept = torch.arange(0, len(item.patches) // 4, 3)
        patches = item.patches.unflatten(0, (-1, 4))[kept].flatten(0, 1)
        parts.append(replace(item, patches=patches, cells=kept))
    expected = torch.cat([each.embeds for each in opened.encode_items(parts)])
    for tower in (opened.session, with_range(opened.session, "tokens", 12)):
        torch.testing.assert_close(packed(tower, parts), expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(("symbol", "most"), [("tokens", 12), ("frame_runs", 1)])
def test_what_no_call_takes_is_cut_between_items_and_frames(
    opened: Pipeline, mixed: list[MediaItem], symbol: str, most: int
) -> None:
    whole = packed(opened.session, mixed)
    tower = with_range(opened.session, symbol, most)
    torch.testing.assert_close(packed(tower, mixed), whole, atol=ROUNDING, rtol=0)
    assert tower.num_calls > 1
    # Items by themselves are cut by the same rule.
    outcomes = Encoder(tower, EncoderOptions()).encode([EncoderInput(item=item) for item in mixed])
    rows = torch.cat([each.encoded.embeds for each in outcomes if isinstance(each, EncoderOutput)])
    torch.testing.assert_close(rows, whole, atol=ROUNDING, rtol=0)


def test_calls_hold_no_more_tokens_than_is_usual_where_the_profile_allows_more(
    opened: Pipeline, mixed: list[MediaItem], monkeypatch
) -> None:
    monkeypatch.setattr(encoder, "MOST_TOKENS", 20)
    tower = EngineSession(opened.bundle, opened.engine, opened.recipe)
    torch.testing.assert_close(packed(tower, mixed), packed(opened.session, mixed), atol=ROUNDING, rtol=0)
    # Of 6, 24, 8 and 27 tokens: the images as they are, both videos cut between frames.
    assert tower.num_calls == 6
    # The frame of an image stays whole.
    tower.require([(1, 20, 20)])


def test_a_frame_that_no_call_takes_is_refused_with_the_largest_that_one_does(opened: Pipeline) -> None:
    tower = with_range(opened.session, "tokens", 12)
    tower.require([(1, 6, 8), (40, 4, 4)])
    with pytest.raises(LimitError, match=r"1 frame of 10 x 16 patches .* largest that fits is 4 x 8"):
        tower.require([(1, 10, 16)])
    with pytest.raises(LimitError, match=r"1 frame of 2 x 40 patches .* largest that fits is 2 x 24"):
        tower.require([(2, 2, 40)])


def test_rows_of_another_number_width_or_dtype_are_refused(opened: Pipeline, subtests) -> None:
    width = opened.session.packing.row_width
    good = torch.zeros(24, width)
    for rows in (good[:-1], good[:, 1:], good.to(torch.uint8), good.to(torch.int64)):
        with subtests.test(f"{rows.dtype} {list(rows.shape)}"), pytest.raises(InputError, match="24, 1176"):
            opened.session.run_packed(rows, [(1, 4, 6)])
    assert torch.equal(
        opened.session.run_packed(good, [(4, 6)]), opened.session.run_packed(good, [(1, 4, 6)])
    )
    for grids in ([], [(1, 3, 8)], [(0, 4, 6)], [(1, 1, 4, 6)]):
        with subtests.test(str(grids)), pytest.raises(InputError):
            opened.session.run_packed(good, grids)


def test_half_precision_patches_become_those_of_the_engine(opened: Pipeline, mixed: list[MediaItem]) -> None:
    media = [replace(item, patches=item.patches.half()) for item in mixed]
    wide = [replace(item, patches=item.patches.float()) for item in media]
    assert torch.equal(packed(opened.session, media), packed(opened.session, wide))
