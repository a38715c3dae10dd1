"""Positions equal the recorded ones: one media item, whole prompts, pruned prompts, expanded videos."""

import pytest
import torch

from tests.golden_data import cases
from tests.positions.blocks import media_positions, recompute_positions
from vlexport.positions.expanded import expanded_video, timestamps_in
from vlexport.positions.mrope import frame_positions, initial_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionRule

MARKERS = FrameMarkers(vision_start=7, vision_end=8, video=6)
TIME_AS_TEXT = PositionRule(kind="time_as_text", markers=MARKERS)


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
        ours = initial_positions(case.inputs["input_ids"].tolist(), media, TIME_AS_TEXT, pruned=pruned)
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
