"""What positions refuse, by the text that people act on."""

import re
from typing import Any

import pytest
import torch

from tests.positions.blocks import media_positions
from vlexport.errors import InputError
from vlexport.positions.expanded import expanded_video
from vlexport.positions.mrope import (
    frame_positions,
    initial_positions,
    pruned_positions,
)
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionOptions, PositionRule

TIMES: tuple[Any, ...] = ("integer", "float")
TIMED = PositionRule(kind="time_scaled")
WRITTEN = PositionRule(kind="time_as_text", markers=FrameMarkers(vision_start=7, vision_end=8, video=6))


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
