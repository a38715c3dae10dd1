"""Packing into engine calls, cutting videos, the cache, and what one bad item does to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from vlexport.backends import Engine
from vlexport.errors import InputError, LimitError, VlexportError
from vlexport.evaluate.sweep import Case, Runner, SweepPlan
from vlexport.runtime.embedding_cache import EmbeddingCache, item_key, pixels_key
from vlexport.runtime.encoder import Encoder, EncoderOptions, EncoderOutput, SharedCalls
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.request import EncoderInput, Generation, Request
from vlexport.specs import MediaItem, Pixels

# Rows of a call and rows of another one differ by what matrix products of other heights round differently:
# 1e-6 here, on values around 1.
ROUNDING = 1e-5
SHORT = Generation(max_new_tokens=3)


def encoder(fresh, **options) -> Encoder:
    made: Encoder = fresh(encoder=EncoderOptions(**options)).encoder
    return made


def media(made: Encoder, *pixels: Pixels) -> list[EncoderInput]:
    tower = made.session
    return [EncoderInput(item=tower.recipe.preprocess(tower.config, each)) for each in pixels]


def embeds(outcome: EncoderOutput | VlexportError) -> torch.Tensor:
    assert isinstance(outcome, EncoderOutput)
    return outcome.encoded.embeds


def close(found: Sequence[EncoderOutput | VlexportError], expected: Sequence[EncoderOutput | VlexportError]):
    """Compare the embeddings of items, one by one."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(embeds(one), embeds(other), atol=ROUNDING, rtol=0)


MIXED = (image(0), video(1), image(2, 112, 56), video(3, 5, 84, 84), image(4))


def test_items_of_one_call_come_back_in_the_order_given(fresh):
    made = encoder(fresh)
    found = made.encode(media(made, *MIXED))
    assert made.session.num_calls == 1
    close(found, [made.encode(media(made, each))[0] for each in MIXED])


@pytest.mark.parametrize(("max_tokens", "calls"), [(16384, 1), (30, 3), (1, 23)])
def test_calls_hold_no_more_tokens_than_they_may_where_frames_can_be_parted(fresh, max_tokens, calls):
    made = encoder(fresh, max_tokens=max_tokens)
    found = made.encode(media(made, *MIXED))
    assert made.session.num_calls <= calls
    close(found, (whole := encoder(fresh)).encode(media(whole, *MIXED)))


def test_a_call_holds_no_more_items_than_it_may(fresh):
    made = encoder(fresh, max_items=2)
    made.encode(media(made, *MIXED))
    assert made.session.num_calls == 3


def test_an_engine_of_few_sizes_gets_calls_that_fill_them(fresh, monkeypatch):
    whole = encoder(fresh)
    expected = whole.encode(media(whole, *MIXED))
    monkeypatch.setattr(Engine, "budgets", (8, 16, 32))
    made = encoder(fresh)
    assert made.budgets == (8, 16, 32, 16384)
    found = made.encode(media(made, *MIXED))
    # 6 + 6 + 8 tokens go into 32 with 12 of padding; 24 and 27 take 32 each rather than 64 or more together.
    assert made.session.num_calls == 3
    close(found, expected)


def test_a_video_cut_between_frames_is_put_together_again(fresh):
    whole, cut = encoder(fresh), encoder(fresh, max_tokens=6)
    (expected,) = whole.encode(media(whole, video(1)))
    (found,) = cut.encode(media(cut, video(1)))
    assert cut.session.num_calls == 4
    close([found], [expected])
    assert isinstance(found, EncoderOutput)
    assert found.encoded.grid == (4, 4, 6)


def test_an_item_that_the_engine_refuses_fails_alone(fresh):
    made = encoder(fresh)
    good = media(made, *MIXED)
    bad = replace(good[1], item=replace(good[1].item, patches=good[1].item.patches[:-1]))
    found = made.encode([*good[:2], bad, *good[2:]])
    assert isinstance(found[2], InputError)
    close([*found[:2], *found[3:]], made.encode(good))


def test_equal_items_of_a_call_are_encoded_once(fresh):
    made = encoder(fresh)
    (one,) = media(made, image(0))
    key = item_key(one.item, {})
    found = made.encode([replace(one, key=key), replace(one, key=key)])
    assert torch.equal(embeds(found[0]), embeds(found[1]))
    assert len(made.cache) == 1


def test_an_item_is_encoded_where_an_equal_one_of_the_call_was_known_and_has_left_the_cache(fresh):
    made = encoder(fresh)
    (one,) = media(made, image(0))
    one = replace(one, key=item_key(one.item, {}))
    (first,) = made.encode([one])
    assert isinstance(first, EncoderOutput)
    found = made.encode([replace(one, encoded=first.encoded), one])
    assert torch.equal(embeds(found[0]), embeds(found[1]))
    assert made.session.num_calls == 2


def answer_to(pipeline, *, images=(), videos=(), text="what?"):
    words = prompt(IMAGE * len(images), VIDEO * len(videos), text)
    return pipeline.generate(Request(raw_prompt=words, images=images, videos=videos, generation=SHORT))


def test_a_second_question_about_a_picture_costs_no_engine_call_and_gets_the_same_tokens(fresh):
    pipeline = fresh()
    first = answer_to(pipeline, images=[image(0)], videos=[video(1)])
    calls = pipeline.session.num_calls
    second = answer_to(pipeline, images=[image(0)], videos=[video(1)])
    assert (calls, pipeline.session.num_calls) == (1, 1)
    assert second.token_ids == first.token_ids
    assert second.stages["tower"] == 0.0
    assert answer_to(pipeline, images=[image(0)], text="and now?").prompt_token_ids != first.prompt_token_ids
    assert pipeline.session.num_calls == 1


def test_pruning_at_another_rate_needs_no_engine_call(fresh):
    pipeline = fresh()
    words = prompt(VIDEO, "what?")
    whole = Request(raw_prompt=words, videos=[video(1)], generation=SHORT)
    pipeline.generate(whole)
    kept = [pipeline.generate(replace(whole, prune=rate)).kept for rate in (0.25, 0.5, 0.75)]
    assert kept == [(18,), (12,), (6,)]
    assert pipeline.session.num_calls == 1


def test_without_a_cache_every_question_costs_a_call(fresh):
    pipeline = fresh(encoder=EncoderOptions(cache_bytes=0))
    for _ in range(2):
        answer_to(pipeline, images=[image(0)])
    assert pipeline.session.num_calls == 2


def test_rows_are_the_same_under_another_default_dtype_which_loads_in_other_threads_set(fresh):
    pipeline = fresh(encoder=EncoderOptions(cache_bytes=0))
    rows = pipeline.encode(image(0)).embeds
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(pipeline.encode(image(0)).embeds, rows)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_interrupted_call_leaves_what_other_threads_wait_for_to_the_next_one(monkeypatch):
    answers = [KeyboardInterrupt, [InputError("other"), InputError("next")]]
    calls: Any = SharedCalls(Mock(**{"encode.side_effect": answers}))
    other: tuple[str, list[object]] = ("other", [])
    calls._waiting.append(other)
    with pytest.raises(KeyboardInterrupt):
        calls.encode("interrupted")
    assert str(calls.encode("next")) == "next"
    assert str(other[1][0]) == "other"


def test_a_preprocessed_item_is_found_again_too(fresh):
    pipeline = fresh()
    item = pipeline.preprocess(image(0))
    answers = [answer_to(pipeline, images=[item]).token_ids for _ in range(2)]
    assert answers[0] == answers[1]
    assert pipeline.session.num_calls == 1


SETTINGS = {"key": "engine"}


ITEM = MediaItem(kind="video", patches=torch.ones(2, 3), grid=(2, 1, 1), seconds_per_grid=2.0)
OTHERS: dict[str, Any] = {
    "kind": "image",
    "grid": (1, 1, 2),
    "seconds_per_grid": 1.0,
    "slices": ((1, 1), (1, 1)),
    "frame_groups": ((0,), (5,)),
    "frame_seconds": (0.25,),
    "frame_numbers": (3,),
    "cells": torch.tensor([0]),
}


def keys_of_others() -> dict[str, bytes]:
    pixels = video(0)
    frames = pixels.frames
    lower = frames.clone()
    lower[0, 0, 0, 0] ^= 1
    turned = frames.reshape(8, 84, 56, 3)
    return {
        "one byte": pixels_key(replace(pixels, frames=lower), SETTINGS),
        "shape": pixels_key(replace(pixels, frames=turned), SETTINGS),
        "dtype": pixels_key(replace(pixels, frames=frames.view(torch.int8)), SETTINGS),
        "rate": pixels_key(replace(pixels, frames_per_second=3.0), SETTINGS),
        "times": pixels_key(replace(pixels, seconds=(0.5,) * len(frames)), SETTINGS),
        "first": pixels_key(replace(pixels, first=2), SETTINGS),
        "size": pixels_key(replace(pixels, size=(56, 56)), SETTINGS),
        "kind": pixels_key(replace(pixels, kind="image"), SETTINGS),
        "engine": pixels_key(pixels, {"key": "another"}),
        "of patches": item_key(ITEM, SETTINGS),
        **{name: item_key(replace(ITEM, **{name: value}), SETTINGS) for name, value in OTHERS.items()},
    }


def test_whatever_shapes_embeddings_is_in_the_key():
    keys = [pixels_key(video(0), SETTINGS), *keys_of_others().values()]
    assert len(set(keys)) == len(keys)
    assert {"patches", *OTHERS} == {field.name for field in fields(MediaItem)}


def test_equal_bytes_have_equal_keys_wherever_they_lie():
    pixels = video(0)
    strided = pixels.frames.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    assert pixels_key(replace(pixels, frames=strided), SETTINGS) == pixels_key(pixels, SETTINGS)


def entry(rows: int) -> tuple[MediaItem, Encoded]:
    item = MediaItem(kind="image", patches=torch.zeros(4, 3), grid=(1, 2, 2))
    embeddings = torch.zeros(100, 4)[:rows]
    return item, Encoded(kind="image", embeds=embeddings, grid=item.grid, seconds_per_grid=None, layers={})


def test_the_entry_that_was_not_used_for_longest_goes_first():
    cache = EmbeddingCache(max_bytes=3 * 16)
    for key in (b"a", b"b", b"c"):
        cache.store(key, *entry(rows=1))
    assert cache.find(b"a") is not None
    cache.store(b"d", *entry(rows=1))
    assert [cache.find(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert (cache.num_bytes, len(cache)) == (48, 3)


def test_what_is_larger_than_the_cache_is_not_kept_and_a_key_stored_again_is_counted_once():
    cache = EmbeddingCache(max_bytes=64)
    cache.store(b"a", *entry(rows=1))
    cache.store(b"b", *entry(rows=5))
    assert (cache.find(b"a") is not None, cache.find(b"b")) == (True, None)
    for rows in (3, 2):
        cache.store(b"a", *entry(rows=rows))
    assert (cache.num_bytes, len(cache)) == (32, 1)
    with pytest.raises(InputError, match=r"0 \(no cache\) or more expected"):
        EmbeddingCache(max_bytes=-1)


def test_kept_embeddings_do_not_hold_the_memory_of_their_neighbours():
    cache = EmbeddingCache(max_bytes=64)
    cache.store(b"a", *entry(rows=1))
    found = cache.find(b"a")
    assert found is not None
    assert found.encoded.embeds.untyped_storage().nbytes() == 16
    assert found.item.patches.untyped_storage().nbytes() == 0


def test_an_item_above_the_profile_is_refused_and_the_others_are_encoded(fresh):
    made = encoder(fresh)
    patches = torch.zeros(1, 1176).expand(4 * 65537, -1)
    too_many = MediaItem(kind="image", patches=patches, grid=(1, 2, 2 * 65537))
    found = made.encode([*media(made, image(0)), EncoderInput(item=too_many)])
    assert isinstance(found[0], EncoderOutput)
    assert isinstance(found[1], LimitError)


def test_encode_encode_all_generate_and_sweep_cut_a_long_video_alike_and_share_the_cache(fresh):
    film = video(1)
    (whole,) = fresh().encode(videos=[film])
    cut = fresh(encoder=EncoderOptions(max_tokens=10))
    (first,) = cut.encode(videos=[film])
    calls = cut.session.num_calls
    assert calls > 1
    torch.testing.assert_close(first.embeds, whole.embeds, atol=ROUNDING, rtol=0)
    assert first.grid == whole.grid
    (written,) = cut.encode([film])
    written.embeds.zero_()
    (again,), (alike,) = cut.encode([film]), cut.encode_all(videos=[film])
    (listed,) = cut.encode_each([("video", film)])
    for one in (again, alike, listed):
        assert torch.equal(one.embeds, first.embeds)
    cut.generate("What?", videos=[film], generation=SHORT)
    assert cut.session.num_calls == calls
    case = Case(name="film", prompt="What?", kind="video", source=film, fps=None)
    runner = Runner(cut, SweepPlan(generation=SHORT))
    swept, _ = runner._encoded(case)
    assert torch.equal(swept.embeds, first.embeds)
    assert cut.session.num_calls == calls


def test_equal_items_of_one_call_have_memory_of_their_own(fresh):
    one, other = fresh().encode(images=[image(0), image(0)])
    assert torch.equal(one.embeds, other.embeds)
    assert one.embeds.data_ptr() != other.embeds.data_ptr()
