"""Positions: as recorded, of one item, whole, pruned and expanded prompts; refused; compiled whole."""

import random
import re
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.golden_data import cases
from tests.positions.blocks import media_positions, recompute_positions
from vlexport.errors import InputError
from vlexport.positions.expanded import expanded_video, timestamps_in
from vlexport.positions.media import pruned_channels
from vlexport.positions.mrope import (
    frame_positions,
    initial_positions,
    pruned_positions,
)
from vlexport.positions.plan import write_kept_positions, write_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionOptions, PositionRule

MARKERS = FrameMarkers(vision_start=7, vision_end=8, video=6)
WRITTEN = PositionRule(kind="time_as_text", markers=MARKERS)


def placed(feature, seconds=None):
    kind, offset, length, *grid = feature[:6]
    return PlacedMedia(
        modality=kind, offset=offset, length=length, grid=tuple(grid), seconds_per_grid=seconds
    )


def test_positions_inside_a_media_item_equal_the_recorded_ones():
    for case in cases("mrope_media"):
        meta = case.meta
        ours = media_positions(
            tuple(meta["thw"]), meta["merge"], meta["tokens_per_second"], meta["video_second_per_grid"]
        )
        assert torch.equal(ours, case.outputs["positions"]), meta


def test_prompts_with_scaled_time_equal_the_recorded_ones_in_any_order_of_media():
    for case in cases("mrope_init_qwen2"):
        rule = PositionRule(
            kind="time_scaled",
            merge=case.meta["merge"],
            tokens_per_second=case.meta["tokens_per_second"] or 1,
        )
        media = [placed(feature, feature[6]) for feature in case.meta["features"]]
        ids = case.inputs["input_ids"].tolist()
        for order in (media, media[::-1]):
            ours = initial_positions(ids, order, rule)
            assert torch.equal(ours.table_RN, case.outputs["positions"]), case.meta
            assert torch.equal(ours.delta, case.outputs["delta"]), case.meta


def test_prompts_with_time_as_text_equal_the_recorded_ones():
    for case in cases("mrope_init_qwen3"):
        media = [placed(feature) for feature in case.meta["features"]]
        pruned = any(feature[6]["lumped"] for feature in case.meta["features"])
        ours = initial_positions(case.inputs["input_ids"].tolist(), media, WRITTEN, pruned=pruned)
        assert torch.equal(ours.table_RN, case.outputs["positions"]), case.meta
        assert torch.equal(ours.delta, case.outputs["delta"]), case.meta


def test_recomputed_positions_equal_the_plain_rule_and_the_oracle_where_it_follows_the_rule():
    agreeing = 0
    for case in cases("recompute"):
        blocks = [case.inputs[f"block{index}"] for index in range(len(case.meta["media"]))]
        offsets = [offset for _, offset, _ in case.meta["media"]]
        num_columns = case.inputs["input_ids"].shape[0]
        ours = recompute_positions(num_columns, offsets[::-1], blocks[::-1])
        assert torch.equal(ours.table_RN, case.inputs["reference"]), case.meta
        if case.meta["reference_agrees"]:
            last = len(case.meta["bounds"]) - 2
            assert torch.equal(ours.table_RN, case.outputs[f"after_{last}"]), case.meta
            # A last chunk without media reports no delta; the one before it counted the same table.
            recorded = [delta for delta in case.meta["deltas"] if delta is not None][-1]
            agreeing += int(ours.delta) == recorded
    assert agreeing == 91


def test_expanded_videos_equal_the_recorded_layouts():
    for case in cases("q3_expanded"):
        kept = case.inputs["mask"].nonzero().flatten()
        stamps = case.meta["timestamp_ids"]
        rule = PositionRule(kind="time_as_text", merge=case.meta["merge"], markers=MARKERS)
        ours = expanded_video(kept, tuple(case.meta["thw"]), stamps, rule)
        assert torch.equal(ours.channels_5L, case.outputs["channels"])
        assert torch.equal(ours.ids_L, case.outputs["ids"])
        assert torch.equal(ours.tokens_per_frame_T, case.outputs["tokens_per_frame"])
        assert torch.equal(ours.video_columns_K, ours.channels_5L[4].nonzero().flatten())
        video = PlacedMedia(modality="video", offset=0, length=len(ours.ids_L), grid=tuple(case.meta["thw"]))
        placed_alone = frame_positions(ours.ids_L.tolist(), [video], [kept], rule)
        assert torch.equal(placed_alone.table_RN, case.outputs["channels"][:3])
        for name in ("ids", "lumped_ids"):
            assert timestamps_in(case.outputs[name].tolist(), video.grid, rule) == stamps


def test_times_inside_a_media_item_are_rounded_like_float32():
    # 100 * 0.29 is 28.999999999999996 in double precision and 29 in single.
    assert int(media_positions((101, 1, 1), 1, 1.0, 0.29)[100, 0]) == 29


def test_times_of_an_un_pruned_prompt_widen_the_float32_interval_and_multiply_in_double():
    # float32(0.04) * 25 is 0.99999998, so frame 1 is still at 0.
    video = PlacedMedia(modality="video", offset=0, length=3, grid=(3, 1, 1), seconds_per_grid=0.04)
    rule = PositionRule(kind="time_scaled", merge=1, tokens_per_second=25)
    assert initial_positions([6, 6, 6], [video], rule).table_RN[0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("kind", ["time_scaled", "time_as_text", "linear"])
def test_text_counts_up_from_zero_under_every_rule(kind):
    rule = PositionRule(kind=kind, markers=MARKERS)
    ours = initial_positions([100, 101, 102], [], rule)
    assert ours.table_RN.tolist() == [[0, 1, 2]] * (1 if kind == "linear" else 3)
    assert int(ours.delta) == 0


def test_linear_positions_ignore_media():
    image = PlacedMedia(modality="image", offset=1, length=4, grid=(1, 4, 4))
    ours = initial_positions([7, 5, 5, 5, 5, 8], [image], PositionRule(kind="linear"))
    assert ours.table_RN.tolist() == [[0, 1, 2, 3, 4, 5]]


TIMES: tuple[Any, ...] = ("integer", "float")
TIMED = PositionRule(kind="time_scaled")


def refused(message):
    return pytest.raises(InputError, match=re.escape(message))


def video(length=8, offset=1, grid=(2, 4, 4), seconds=1.0):
    return PlacedMedia(modality="video", offset=offset, length=length, grid=grid, seconds_per_grid=seconds)


def image(length=4, grid=(1, 4, 4)):
    return PlacedMedia(modality="image", offset=1, length=length, grid=grid)


def test_media_that_contradict_themselves_are_refused():
    with refused("modality 'audio' is unknown; expected one of: image, video."):
        PlacedMedia(modality="audio", offset=0, length=1, grid=(1, 2, 2))  # type: ignore[arg-type]
    with refused("image at 1 has 3 frames; an image has 1. Pass it as a video."):
        image(12, (3, 4, 4))
    with refused("grid (0, 4, 4): expected frames, rows and columns of 1 or more."):
        video(grid=(0, 4, 4))
    with refused("placeholder at 1 of length 0: expected an offset of 0 or more and at least one token"):
        video(length=0)
    for seconds in (-1.0, float("inf"), float("nan")):
        with refused(f"seconds_per_grid {seconds}: expected a finite number of 0 or more."):
            video(seconds=seconds)


def test_grids_and_placeholders_that_do_not_match_are_refused():
    with refused("grid (2, 4, 3): 4 x 3 patches do not divide by the merge size 2. Resize to a multiple"):
        initial_positions([6] * 20, [video(grid=(2, 4, 3))], TIMED)
    with refused("grid (1, 5, 4): 5 x 4 patches do not divide by the merge size 2."):
        media_positions((1, 5, 4), 2)
    with refused("video at 1: its placeholder has 5 tokens, its grid (2, 4, 4) gives 8. Expand the prompt"):
        initial_positions([6] * 20, [video(5)], TIMED)
    with refused("image at 1: its placeholder has 5 tokens, its grid (1, 4, 4) gives 4."):
        initial_positions([5] * 20, [image(5)], TIMED, pruned=True)
    with refused("placeholder at 3 begins before column 5, where the one before it ends"):
        initial_positions([5] * 30, [image(), video(offset=3)], TIMED)
    with refused("the last placeholder ends at 9, the prompt has 8 tokens; pass the whole expanded prompt."):
        initial_positions([6] * 8, [video()], TIMED)


def test_kept_indices_that_do_not_fit_their_media_or_rule_are_refused():
    with refused("video at 1: its placeholder has 5 tokens, 4 of 8 are kept. Size the placeholder with"):
        pruned_positions(10, [video(5)], [torch.arange(4)], TIMED)
    with refused("kept indices of the video at 1 are torch.bool of shape [8]; expected a flat int64 tensor."):
        pruned_positions(10, [video()], [torch.ones(8, dtype=torch.bool)], TIMED)
    with refused("kept indices are torch.bool of shape [8]; expected a flat int64 tensor."):
        expanded_video(torch.ones(8, dtype=torch.bool), (2, 4, 4), [[200], [201]], WRITTEN)
    with refused("2 media and 1 kept lists given; expected one list per item."):
        pruned_positions(20, [image(), video(offset=6)], [None], TIMED)
    with refused("position rule 'time_as_text' given; kept indices alone give positions under 'time_scaled'"):
        pruned_positions(20, [video()], [torch.arange(8)], WRITTEN)
    for rule in (PositionRule(kind="time_scaled", options=PositionOptions(pruned_time=t)) for t in TIMES):
        with refused("video at 1 has no seconds_per_grid, and pruning needs it. Pass temporal patch size"):
            pruned_positions(20, [video(seconds=None)], [torch.arange(8)], rule)


def test_frames_that_the_prompt_does_not_hold_are_refused():
    ids = [100, 7, 6, 6, 6, 6, 8, 6, 6]
    with refused("video at 1: 1 of 2 frames found between their markers in its 8 tokens; give every frame"):
        initial_positions(ids, [video()], WRITTEN)
    ids = [100, 7, 6, 6, 8, 7, 6, 8, 100]
    with refused("video at 1: its frames hold [2, 1] tokens in the prompt, the grid (2, 4, 4) has 4"):
        initial_positions(ids, [video(7)], WRITTEN)
    with refused("1 timestamps given for the 2 frames of grid (2, 4, 4); expected the token ids of one"):
        expanded_video(torch.arange(8), (2, 4, 4), [[200]], WRITTEN)
    with refused("position rule 'time_scaled' has no frame markers; an expanded layout needs"):
        expanded_video(torch.arange(8), (2, 4, 4), [[200], [201]], TIMED)
    with refused("video at 1: [4, 3] tokens of its frames are kept, its placeholder has room for others."):
        frame_positions(ids, [video(7)], [torch.arange(7)], WRITTEN)


def test_rules_and_options_refuse_what_they_cannot_use():
    with refused("position rule 'spiral' is unknown; expected one of: linear, time_as_text, time_scaled."):
        PositionRule(kind="spiral")  # type: ignore[arg-type]
    with refused("merge size 0: expected at least 1; take it from the vision config."):
        PositionRule(kind="linear", merge=0)
    with refused("tokens_per_second 0: expected a positive number; take it from the vision config."):
        PositionRule(kind="time_scaled", tokens_per_second=0)
    with refused("time_as_text: no markers given; name the ids of vision start, end and video."):
        PositionRule(kind="time_as_text")
    with refused("resume 'width' is unknown; expected one of: max_plus_one, spatial."):
        PositionOptions(resume="width")  # type: ignore[arg-type]
    with refused("pruned_resume 'spatial' is unknown; expected one of: max, reference."):
        PositionOptions(pruned_resume="spatial")  # type: ignore[arg-type]
    with refused("pruned_time 'double' is unknown; expected one of: float, integer."):
        PositionOptions(pruned_time="double")  # type: ignore[arg-type]


PACED = PositionRule(kind="time_scaled", tokens_per_second=2)
NUM_SHAPES = 60


def random_prompt(rng, smallest):
    """Length, media and kept indices of a prompt whose sizes are all at least `smallest`."""
    media, kept, at = [], [], rng.randint(smallest - 1, 9)
    for _ in range(rng.randint(smallest, 6)):
        grid = (rng.randint(smallest, 6), 2 * rng.randint(smallest, 7), 2 * rng.randint(smallest, 7))
        tokens = grid[0] * grid[1] * grid[2] // 4
        kept.append(torch.tensor(sorted(rng.sample(range(tokens), rng.randint(smallest, tokens)))))
        length = kept[-1].shape[0]
        media.append(PlacedMedia(modality="video", offset=at, length=length, grid=grid, seconds_per_grid=1.0))
        at += length + rng.randint(0, 9)
    return max(at, smallest), media, kept


def compiled(program, backend="aot_eager"):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return counter, torch.compile(program, fullgraph=True, dynamic=True, backend=counter)


def blocks_of(media, kept):
    return [pruned_channels(*pair) for pair in zip(media, [PACED] * len(media), kept, strict=True)]


def from_blocks(resume):
    def positions(rng, smallest):
        length, media, kept = random_prompt(rng, smallest)
        offsets, options = [item.offset for item in media], PositionOptions(pruned_resume=resume)
        blocks = blocks_of(media, kept)
        return lambda **how: [recompute_positions(length, offsets, blocks, options, **how).table_RN]

    return positions


def from_kept_indices(rng, smallest):
    length, media, kept = random_prompt(rng, smallest)

    def positions(**how):
        found = pruned_positions(length, media, kept, PACED, **how)
        return [found.table_RN, found.delta]

    return positions


PROGRAMS = {
    "blocks, reference": (write_positions, from_blocks("reference")),
    "blocks, max": (write_positions, from_blocks("max")),
    "kept indices": (write_kept_positions, from_kept_indices),
}


def check_compiled(name, smallest, most, backend="aot_eager"):
    program, draw = PROGRAMS[name]
    rng = random.Random(name)
    counter, write = compiled(program, backend)
    for _ in range(NUM_SHAPES):
        positions = draw(rng, smallest)
        for ours, plain in zip(positions(write=write), positions(), strict=True):
            assert torch.equal(ours, plain)
    assert 1 <= counter.frame_count <= most


# With sizes of 2 and more, and with sizes of 1 among them. A first call whose sizes happen to coincide
# costs one compilation more, and so does each size of 1.
@pytest.mark.seconds
@pytest.mark.parametrize("name", PROGRAMS)
def test_positions_compile_at_most_twice_and_a_few_times_with_sizes_of_1(name):
    check_compiled(name, 2, 2)
    check_compiled(name, 1, 5)


@pytest.mark.slow
def test_native_code_gives_the_same_integers():
    check_compiled("kept indices", 2, 2, "inductor")
