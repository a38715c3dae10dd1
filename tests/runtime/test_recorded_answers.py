"""Whole requests against what another runtime answered, token for token, on both backends."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from tests.runtime.recorded import ALL, CHECKPOINT, FROM_PATCHES, TRUTHS, Recorded, recorded, with_generation
from vlexport.positions.rules import PositionOptions
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels

NAMES = [case["name"] for case in TRUTHS]


@pytest.mark.seconds
def test_prompt_masks_positions_and_tokens_equal_the_recorded_ones(answering: Pipeline, subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            one = recorded(name)
            answer = compare(answering, one)
            assert not one.case["q"] or set(answer.forms.values()) == {"compiled"}


def compare(answering: Pipeline, one: Recorded) -> Answer:
    answer = answering.generate(one.request)
    assert list(answer.prompt_token_ids) == one.case["prompt_token_ids"]
    assert list(answer.kept) == one.case["retained"]
    assert [item.num_tokens for item in answer.media] == one.case["visual_tokens"]
    for index, item in enumerate(answer.media):
        assert item.grid == one.grid(index)
        assert (item.mask is None) == (f"media{index}.mask" not in one.tensors)
        assert item.mask is None or torch.equal(item.mask, one.tensors[f"media{index}.mask"])
    assert torch.equal(answer.positions, one.tensors["positions"])
    assert answer.delta == one.case["delta"]
    assert list(answer.token_ids) == one.case["token_ids"]
    assert answer.finish == "length"
    return answer


@pytest.mark.seconds
def test_a_picture_resized_here_gives_the_recorded_tokens_too(answering: Pipeline) -> None:
    for name in sorted(FROM_PATCHES):
        one = recorded(name)
        pixels = Pixels(kind="image", frames=one.tensors["media0.raw"][None])
        answer = answering.generate(replace(one.request, images=[pixels]))
        assert list(answer.prompt_token_ids) == one.case["prompt_token_ids"], name
        assert list(answer.token_ids) == one.case["token_ids"], name


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, None])
@pytest.mark.parametrize("name", ["image_then_video", "evs_q75_fps3", "evs_chunked_q50"])
def test_tokens_do_not_depend_on_the_size_of_prefill_chunks(
    answering: Pipeline, name: str, chunk: int | None
) -> None:
    one = recorded(name)
    answer = answering.generate(with_generation(one.request, prefill_chunk=chunk))
    assert list(answer.token_ids) == one.case["token_ids"]


@pytest.mark.seconds
def test_requests_among_others_get_the_tokens_they_get_alone(answering: Pipeline) -> None:
    answering.encoder.cache.clear()
    outcomes = answering.generate_all([recorded(name).request for name in NAMES])
    expected = [case["token_ids"] for case in TRUTHS]
    assert [list(one.token_ids) for one in outcomes] == expected  # type: ignore[union-attr]


def frames(kind: str, shape: list[int], seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    size = (1, *shape) if kind == "image" else tuple(shape)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=random)


def request_like(case: dict, seed: int) -> Request:
    """The request of a case whose pixels were not kept, with others of the same sizes."""
    media: dict[str, list[Pixels]] = {"image": [], "video": []}
    for index, about in enumerate(case["media"]):
        pixels = frames(about["kind"], about["shape"], seed + index)
        media[about["kind"]].append(Pixels(kind=about["kind"], frames=pixels, frames_per_second=about["fps"]))
    return Request(
        raw_prompt=case["prompt"],
        images=media["image"],
        videos=media["video"],
        prune=case["q"],
        generation=Generation(max_new_tokens=4, prefill_chunk=case["chunk_budget"]),
    )


def plain_positions(case: dict, answer, ids: dict[str, int]) -> list[list[int]]:
    """The pruned rule, token by token: kept cells from their item's base, then text at base plus width."""
    columns, base, media, column = [], 0, iter(zip(case["media"], answer.media, strict=True)), 0
    prompt = answer.prompt_token_ids
    while column < len(prompt):
        if prompt[column] not in ids.values():
            columns.append((base, base, base))
            base, column = base + 1, column + 1
            continue
        about, item = next(media)
        rows, width = item.grid[1] // 2, item.grid[2] // 2
        kept = range(item.num_tokens) if item.mask is None else item.mask.nonzero().flatten().tolist()
        # Two frames a grid, cut to whole seconds; two positions a second in this checkpoint.
        step = 0 if about["fps"] is None else int(2 / about["fps"]) * 2
        for cell in kept:
            at = (cell // (rows * width) * step, cell // width % rows, cell % width)
            columns.append(tuple(base + each for each in at))
        base, column = base + width, column + len(kept)
    return [list(row) for row in zip(*columns, strict=True)]


def test_requests_that_break_the_other_runtime_follow_the_plain_rule(answering: Pipeline, subtests) -> None:
    assert answering.language is not None
    tokenizer = answering.language.tokenizer
    ids = {kind: tokenizer.id_of(f"<|{kind}_pad|>") for kind in ("image", "video")}
    for case in ALL:
        if case["truth"]:
            continue
        with subtests.test(case["name"]):
            answer = answering.generate(request_like(case, seed=5))
            expected = plain_positions(case, answer, ids)
            assert answer.positions.tolist() == expected
            assert answer.delta == max(map(max, expected)) + 1 - len(answer.prompt_token_ids)
            assert len(answer.token_ids) == 4


@pytest.fixture(scope="module")
def transformers_model():
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)


@pytest.fixture
def spatial(fresh) -> Pipeline:
    pipeline: Pipeline = fresh(positions=PositionOptions(resume="spatial"))
    return pipeline


# transformers 5.23 lets text go on after the larger side of a picture, however long its video: our `spatial`.
# Left out: it multiplies times in float32, so that 5 * 1.8 ends one higher (fps_float32); and where a video's
# time runs beyond the text after it, decoding goes on from the last token, not the largest position (fps1).
OTHER_RULE = {"video_fps1", "video_fps_float32"}
UNPRUNED = [case["name"] for case in TRUTHS if not case["q"] and not case["embeds"]]
UNPRUNED = [name for name in UNPRUNED if name not in OTHER_RULE]
CUTS_SECONDS = Version(version("transformers")) < Version("5.18")


def timed_for_transformers(one: Recorded) -> Request:
    """Return the request; with whole seconds for both sides where transformers cuts them (before 5.18)."""
    if not CUTS_SECONDS:
        return one.request
    videos = [
        MediaItem(
            kind="video",
            patches=one.tensors[f"media{place}.pixel_values_videos"],
            grid=one.grid(place),
            seconds_per_grid=float(int(one.tensors[f"media{place}.second_per_grid_ts"])),
        )
        for place, about in enumerate(one.case["media"])
        if about["kind"] == "video"
    ]
    return replace(one.request, videos=videos)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNPRUNED)
def test_tokens_equal_those_of_transformers_by_its_own_position_rule(
    spatial: Pipeline, transformers_model, name: str
) -> None:
    one = recorded(name)
    answer = spatial.generate(timed_for_transformers(one))
    ids = torch.tensor([answer.prompt_token_ids])
    found: dict[str, object] = {"attention_mask": torch.ones_like(ids)}
    for kind, patches in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        places = [place for place, item in enumerate(answer.media) if item.kind == kind]
        if places:
            found[patches] = torch.cat([one.tensors[f"media{place}.{patches}"] for place in places])
            found[f"{kind}_grid_thw"] = torch.tensor([answer.media[place].grid for place in places])
    seconds = [item.seconds_per_grid for item in answer.media if item.kind == "video"]
    assert spatial.language is not None
    id_of = spatial.language.tokenizer.id_of
    numbers = {id_of(f"<|{kind}_pad|>"): at for at, kind in ((1, "image"), (2, "video"))}
    found["mm_token_type_ids"] = torch.tensor([[numbers.get(each, 0) for each in answer.prompt_token_ids]])
    if seconds:
        found["second_per_grid_ts"] = seconds
    made = transformers_model.generate(ids, max_new_tokens=32, do_sample=False, **found)
    assert made[0, ids.shape[1] :].tolist() == list(answer.token_ids)
