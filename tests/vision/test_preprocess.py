"""Frames to rows of patches: against recorded pixel values, against transformers' processor, and by hand."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.golden_data import FOLDER
from vlexport.errors import CheckpointError, InputError, LimitError
from vlexport.specs import Pixels
from vlexport.vision.preprocess import (
    check_patches,
    patch_rule,
    resample,
    resample_in_floats,
    target_size,
    to_patches,
)

E2E = FOLDER / "e2e"
SETTINGS = json.loads((E2E / "checkpoint" / "preprocessor_config.json").read_text())
RULE = patch_rule(SETTINGS, SETTINGS, patch=14, merge=2, temporal=2)
CASES = [case for case in json.loads((E2E / "cases.json").read_text()) if case["truth"] and case["media"]]
# The recorded values were made by another normalisation order; 2e-7 was measured, 1e-5 is the promise.
PIXEL_LIMIT = 1e-5


def changed(**settings):
    return patch_rule({**SETTINGS, **settings}, {**SETTINGS, **settings}, patch=14, merge=2, temporal=2)


def noise(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def image(height, width, seed=0):
    return Pixels(kind="image", frames=noise(1, height, width, 3, seed=seed))


def media_of(case):
    stored = load_file(E2E / case["file"])
    for number, entry in enumerate(case["media"]):
        item = {
            key.split(".")[1]: value for key, value in stored.items() if key.startswith(f"media{number}.")
        }
        raw = item["raw"] if entry["kind"] == "video" else item["raw"][None]
        yield Pixels(kind=entry["kind"], frames=raw, frames_per_second=entry["fps"]), item


def test_pixel_values_grids_and_float32_times_equal_the_recorded_ones():
    kinds = []
    for case in CASES:
        for pixels, recorded in media_of(case):
            made = to_patches(RULE, pixels)
            key = "pixel_values" if pixels.kind == "image" else "pixel_values_videos"
            assert list(made.grid) == recorded["grid_thw"].tolist(), case["name"]
            torch.testing.assert_close(made.patches, recorded[key], rtol=0, atol=PIXEL_LIMIT)
            times = recorded["second_per_grid_ts"].item() if pixels.kind == "video" else None
            assert made.seconds_per_grid == times, case["name"]
            kinds.append(pixels.kind)
    assert (kinds.count("image"), kinds.count("video")) == (9, 13)


@example(4000, 20, (100, 90000))
@example(20, 4000, (3136, 1003520))
@example(80, 84, (9 * 784, 16 * 784))
@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([(3136, 1003520), (100, 90000), (1, 784)]))
def test_target_sizes_are_those_of_transformers(height, width, bounds):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if max(height, width) > 200 * min(height, width):
        with pytest.raises(LimitError, match="200:1"):
            target_size(height, width, 28, *bounds)
        return
    theirs = smart_resize(height, width, 28, *bounds)
    assert target_size(height, width, 28, *bounds) == tuple(max(side, 28) for side in theirs)


def test_the_resize_of_other_devices_is_within_two_grey_levels_of_the_one_for_bytes():
    # Along either way, in and out of range of the antialiasing, and one frame of a real size.
    for before, after in (
        ((300, 400), (112, 140)),
        ((50, 70), (112, 140)),
        ((33, 1000), (56, 840)),
        ((480, 640), (448, 616)),
    ):
        frames = noise(2, 3, *before)
        for mode in ("bicubic", "bilinear"):
            apart = resample_in_floats(frames, *after, mode).int() - resample(frames, *after, mode).int()
            # measured on noise, the worst case; more than one level in 1e-4 of the values where bicubic
            assert apart.abs().max() <= 2, (before, after, mode)


@pytest.mark.gpu
def test_patches_of_frames_on_a_gpu_stay_there_and_are_within_two_grey_levels():
    pixels = image(333, 517)
    there = to_patches(RULE, dataclasses.replace(pixels, frames=pixels.frames.cuda()))
    std = torch.tensor(RULE.std).repeat_interleave(RULE.row_width // 3)
    levels = ((there.patches.cpu() - to_patches(RULE, pixels).patches) * std * 255).abs()
    assert there.patches.device.type == "cuda"
    assert levels.max() <= 2.001


FRAMES = r"uint8 \[frames, height, width, 3\] expected"


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (Pixels(kind="image", frames=torch.zeros(1, 4, 4, 3)), FRAMES),
        (Pixels(kind="image", frames=noise(4, 4, 3)), FRAMES),
        (Pixels(kind="image", frames=noise(1, 3, 4, 4)), FRAMES),
        (Pixels(kind="image", frames=noise(1, 4, 4, 4)), FRAMES),
        (Pixels(kind="video", frames=noise(0, 4, 4, 3)), "at least one pixel"),
    ],
    ids=["floats", "no frames", "channels first", "alpha", "no pixels"],
)
def test_pixels_of_another_form_are_refused(pixels, words):
    with pytest.raises(InputError, match=words):
        to_patches(RULE, pixels)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(InputError, match="frames per second"):
        Pixels(kind="video", frames=noise(2, 28, 28, 3), frames_per_second=rate)


def test_a_checkpoint_that_does_not_resize_refuses_other_sizes():
    with pytest.raises(InputError, match=r"56x30 pixels: this checkpoint does not resize, multiples of 28"):
        to_patches(changed(do_resize=False), image(30, 56))


def test_items_that_contradict_their_grid_or_kind_are_refused():
    item = dataclasses.replace(to_patches(RULE, image(56, 56)), grid=(1, 4, 6))
    message = r"item 0: patches of shape \[16, 1176\] given, \[24, 1176\] expected"
    with pytest.raises(InputError, match=message):
        check_patches([item], RULE.row_width)
    item = to_patches(RULE, Pixels(kind="video", frames=noise(4, 56, 56, 3)))
    assert item.seconds_per_grid is None
    with pytest.raises(InputError, match="an image has one frame"):
        check_patches([dataclasses.replace(item, kind="image")], RULE.row_width)


def test_settings_that_contradict_the_tower_or_themselves_are_refused():
    for settings, words in (
        ({"patch_size": 16}, "patch_size 16 given, but the tower has 14"),
        ({"resample": 1}, "resample 1 given"),
        ({"image_mean": [0.5]}, "three values each"),
        ({"image_std": None}, "three values each"),
        ({"size": {"shortest_edge": 100, "longest_edge": 50}}, "0 < min <= max"),
    ):
        with pytest.raises(CheckpointError, match=words):
            changed(**settings)
    with pytest.raises(CheckpointError, match="one way for both"):
        patch_rule(SETTINGS, {**SETTINGS, "image_mean": [0.0, 0.0, 0.0]}, patch=14, merge=2, temporal=2)


def test_pixels_read_only_to_numpy_give_no_warning():
    array = np.zeros((1, 28, 28, 3), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_patches(RULE, Pixels(kind="image", frames=torch.from_numpy(array)))
