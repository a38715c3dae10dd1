"""Integer rules where both sides of a comparison are equal: the published functions at these very sizes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from vlexport.recipes import nemotron_vl

from tests.reference.processors import processor_module, video_class
from vlexport.errors import LimitError
from vlexport.media.sampling import Sampling, Timeline, choose
from vlexport.pruning.evs import EvsSelector
from vlexport.runtime.embedding_cache import EmbeddingCache
from vlexport.runtime.outputs import Encoded
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.preprocess import ResizeRule, frame_seconds, target_size, volume_size

UNIT = 28
# Half cells, whole ones, and a pixel to either side.
SIDES = [UNIT * half // 2 + step for half in (2, 3, 4, 5, 6, 7) for step in (-1, 0, 1)]


def test_sides_are_the_published_ones_where_a_rounded_area_is_a_bound() -> None:
    met: Counter[str] = Counter()
    for height, width in product(SIDES, SIDES):
        area = round(height / UNIT) * round(width / UNIT) * UNIT**2
        for name, low, high in (("most", 1, area), ("least", area, 10**9), ("both", area, area)):
            wanted = smart_resize(height, width, UNIT, low, high)
            assert target_size(height, width, UNIT, low, high) == wanted, (height, width, name)
            met[name] += area != height * width
    assert min(met.values()) > 200


@pytest.mark.parametrize("shorter", [3, 28, 41])
def test_strips_of_exactly_200_to_1_are_taken_and_longer_ones_refused(shorter: int) -> None:
    for height, width in ((shorter, 200 * shorter), (200 * shorter, shorter)):
        found = target_size(height, width, UNIT, 1, 10**9)
        assert found == tuple(max(side, UNIT) for side in smart_resize(height, width, UNIT, 1, 10**9))
    for height, width in ((shorter, 200 * shorter + 1), (200 * shorter + 1, shorter)):
        with pytest.raises(LimitError, match="200:1"):
            target_size(height, width, UNIT, 1, 10**9)


def test_sides_of_videos_are_the_published_ones_for_odd_counts_of_frames_at_their_bounds() -> None:
    theirs = video_class("qwen3_vl")._preprocess.__globals__["smart_resize"]
    for frames, height, width in product((2, 3, 5, 6, 7, 9), (56, 70, 83), (42, 56, 100)):
        cells = round(height / UNIT) * round(width / UNIT) * UNIT**2
        for whole in (frames // 2 * 2, frames + frames % 2):
            for low, high in ((1, whole * cells), (whole * cells, 10**9)):
                rule = ResizeRule(min_pixels=low, max_pixels=high, frames=2)
                wanted = theirs(frames, height, width, 2, UNIT, low, high)
                assert volume_size(frames, height, width, UNIT, rule) == wanted, (
                    frames,
                    height,
                    width,
                    whole,
                )


def test_times_of_an_odd_video_end_with_the_last_frame_alone() -> None:
    def seconds(frames: int, group: int, **times: object) -> tuple[float, ...]:
        blank = torch.zeros(frames, 1, 1, 3, dtype=torch.uint8)
        return frame_seconds(Pixels(kind="video", frames=blank, **times), group)  # type: ignore[arg-type]

    assert seconds(1, 2, frames_per_second=2.0) == (0.0,)
    assert seconds(3, 2, frames_per_second=2.0) == (0.25, 1.0)
    assert seconds(3, 2, seconds=(0.5, 1.5, 4.0)) == (1.0, 4.0)
    assert seconds(4, 3, seconds=(0.0, 1.0, 2.0, 7.0)) == (1.0, 7.0)
    assert seconds(4, 1, frames_per_second=4.0) == (0.0, 0.25, 0.5, 0.75)


def test_a_frame_half_a_slot_from_its_own_makes_a_rate_variable() -> None:
    def constant(*ticks: int) -> bool:
        return Timeline(ticks=ticks, tick=Fraction(1, 1000), declared_rate=Fraction(10)).is_constant

    assert constant(0, 149, 200, 251)
    assert not constant(0, 150, 200)
    assert not constant(0, 100, 250)
    assert constant(7, 156, 158)


def test_a_frame_is_taken_from_its_very_tick_on() -> None:
    """Half a second apart; each frame is shown from its own time, not only after it."""
    uneven = Timeline(ticks=(0, 499, 500, 1001, 1500, 1999), tick=Fraction(1, 1000), declared_rate=None)
    # 1,999 ms between six frames are 2.3988 s; four of these are 599.7 ms apart.
    assert choose(uneven, Sampling(frames_per_second=1.0)).indices == (0, 2, 3, 4)
    even = Timeline(ticks=(0, 10, 500, 990, 1000, 1500), tick=Fraction(1, 1000), declared_rate=None)
    # 1.8 s: frames at 0, 450, 900 and 1,350 ms.
    assert choose(even, Sampling(frames_per_second=1.0)).indices == (0, 1, 2, 4)
    whole = Timeline(ticks=(0, 300, 450, 900, 910, 1500), tick=Fraction(1, 1000), declared_rate=None)
    assert choose(whole, Sampling(frames_per_second=1.0)).indices == (0, 2, 3, 4)


def test_counts_of_kept_tokens_are_exact_where_the_share_is_a_whole_number() -> None:
    """In doubles 1 - 0.9 is a little less than a tenth, and the reference truncates that product."""
    retained_count = EvsSelector().retained_count
    for per_frame, frames, rate in product((1, 4, 10, 64), (1, 2, 10, 100), (0.0, 0.5, 0.75, 0.9, 0.99)):
        assert retained_count(per_frame, frames, rate) == max(per_frame, int(per_frame * frames * (1 - rate)))
    assert retained_count(10, 10, 0.9) == 10
    assert retained_count(4, 2, 0.5) == 4
    assert retained_count(1, 100, 0.9) == 9


def test_tiles_with_just_half_their_pixels_are_not_filled() -> None:
    theirs = processor_module("image", "got_ocr2").get_optimal_tiled_canvas
    for height, width, side, most in ((128, 144, 64, 12), (64, 72, 32, 12), (64, 72, 48, 6)):
        for step in (0, 1):
            across, down = theirs((height + step, width), (side, side), 1, most)
            assert nemotron_vl.tile_grid(height + step, width, side, most) == (down, across)


def test_an_entry_as_large_as_a_cache_is_kept_and_pushes_all_others_out() -> None:
    item = MediaItem(kind="image", patches=torch.zeros(4, 1), grid=(1, 2, 2))

    def encoded(rows: int) -> Encoded:
        return Encoded(
            kind="image", grid=(1, 2, 2), seconds_per_grid=None, embeds=torch.zeros(rows, 2), layers={}
        )

    cache = EmbeddingCache(max_bytes=4 * 2 * 4)
    cache.store(b"a", item, encoded(2))
    cache.store(b"b", item, encoded(2))
    assert (len(cache), cache.num_bytes) == (2, 32)
    cache.store(b"c", item, encoded(4))
    assert (len(cache), cache.num_bytes, cache.find(b"c") is None) == (1, 32, False)
    cache.store(b"d", item, encoded(5))
    assert (len(cache), cache.find(b"d")) == (1, None)
