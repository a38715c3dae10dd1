"""One tensor of rows in, one out: equal to items one by one, and to what another runtime recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.runtime.made import image, video
from tests.runtime.recorded import TRUTHS, recorded
from vlexport.backends import Engine
from vlexport.errors import InputError, LimitError
from vlexport.runtime import encoder
from vlexport.runtime.encoder import Encoder, EncoderOptions, EncoderOutput, EngineSession
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import EncoderInput
from vlexport.specs import MediaItem, Range

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
    return tower.run_packed(torch.cat([item.patches for item in media]), [item.grid for item in media])


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
