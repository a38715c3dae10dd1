"""Every setting of preprocessing, none at its default, in both spellings: by transformers' processors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference.processors import their_image, their_video, video_class
from tests.reference.slice_config import SLICED, SLICED_CASES, assert_facts, config_facts, sliced_checkpoint
from tests.tiny_minicpmv import VERSIONS
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError, InputError
from vlexport.recipe import find_recipe
from vlexport.specs import Pixels

IMAGE, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
# Images: PIL keeps weights in 22 bits, torch in 16, and both round to bytes after each pass: one level.
# Videos: one kernel on both sides, float32 against float64 normalisation: 1e-3 of a level.
IMAGE_LEVELS, VIDEO_LEVELS = 1.01, 0.01

# One value of each setting that is nobody's default.
COMMON: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 128,
    "do_normalize": True,
    "resample": 2,
    "image_mean": [0.11, 0.22, 0.33],
    "image_std": [0.21, 0.31, 0.41],
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
UNIT = 28 * 28
BOUNDS = {"size": {"shortest_edge": 9 * UNIT, "longest_edge": 16 * UNIT}}
PIXELS = {"min_pixels": 6 * UNIT, "max_pixels": 12 * UNIT}
CASES: dict[str, dict[str, Any]] = {
    "sizes by edges": BOUNDS,
    "sizes by pixels": PIXELS,
    "both spellings": {**BOUNDS, **PIXELS},
    "lower bound by pixels, upper by edges": {**BOUNDS, "min_pixels": 6 * UNIT},
    "upper bound by pixels, lower by edges": {**BOUNDS, "max_pixels": 12 * UNIT},
    "bicubic": {**BOUNDS, "resample": 3},
    "not normalised": {**BOUNDS, "do_normalize": False},
    "not rescaled": {**BOUNDS, "do_rescale": False},
    "neither": {**BOUNDS, "do_rescale": False, "do_normalize": False},
    "not resized": {**BOUNDS, "do_resize": False},
}
CAPS: dict[str, dict[str, Any]] = {
    "capped": {"cap_pixels_per_frame": True, "max_video_tokens": 40},
    "capped at a twentieth above the smallest": {"cap_pixels_per_frame": True, "max_video_tokens": 4},
    "capped by default tokens": {"cap_pixels_per_frame": True},
    "cap given and off": {"cap_pixels_per_frame": False, "max_video_tokens": 40},
}
# Height and width: fitting, small, wide, tall, large, rounded up on both sides.
SIDES = ((84, 112), (30, 45), (60, 190), (170, 70), (260, 300), (75, 130))
FITTING = ((84, 112), (56, 140))


def recipe_and_config(folder: Path, image: Mapping[str, Any], video: Mapping[str, Any]):
    path = write_tiny_qwen2_5_vl(folder / "checkpoint", depth=1, hidden=16, heads=2, with_decoder=False)
    for name, settings in ((IMAGE, image), (VIDEO, video)):
        (path / name).write_text(json.dumps(settings))
    recipe = find_recipe("qwen2_5_vl")
    return recipe, recipe.read_config(Checkpoint.open(path))


def noise(*shape: int) -> torch.Tensor:
    """Return bytes over all levels: sharp edges overshoot and are cut off between the passes of a resize."""
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)


def levels(ours: torch.Tensor, theirs: torch.Tensor, settings: Mapping[str, Any]) -> float:
    """The largest difference in grey levels."""
    scale = settings["rescale_factor"] if settings["do_rescale"] else 1.0
    std = torch.tensor(settings["image_std"] if settings["do_normalize"] else [1.0] * 3).double() / scale
    return float(((ours.double() - theirs.double()).abs() * std.repeat_interleave(ours.shape[1] // 3)).max())


@pytest.mark.parametrize("name", CASES)
def test_images_are_those_of_their_processor(name: str, tmp_path: Path) -> None:
    settings = {**COMMON, **CASES[name]}
    recipe, config = recipe_and_config(tmp_path, settings, {**COMMON, **CASES[name], "size": BOUNDS["size"]})
    for height, width in SIDES if settings["do_resize"] else FITTING:
        frames = noise(1, height, width, 3)
        grid, patches = their_image(settings, frames[0])
        item = recipe.preprocess(config, Pixels(kind="image", frames=frames))
        assert list(item.grid) == grid, (height, width)
        assert levels(item.patches, patches, settings) <= IMAGE_LEVELS, (height, width)


@pytest.mark.parametrize("name", [*CASES, *CAPS])
def test_videos_are_those_of_their_processor(name: str, tmp_path: Path) -> None:
    settings = {**COMMON, **BOUNDS, **CASES.get(name, {}), **CAPS.get(name, {})}
    image = {
        **COMMON,
        **{key: settings[key] for key in COMMON},
        **PIXELS,
        "size": {"shortest_edge": 1, "longest_edge": UNIT},
    }
    recipe, config = recipe_and_config(tmp_path, image, settings)
    # The default is reached by hundreds of frames only.
    tokens = video_class()(**settings).max_video_tokens if settings.get("cap_pixels_per_frame") else None
    assert config.rule.video.video_tokens == tokens
    for number, (height, width) in enumerate(SIDES if settings["do_resize"] else FITTING):
        frames = noise(2 + number, height, width, 3)
        grid, patches = their_video(settings, frames)
        item = recipe.preprocess(config, Pixels(kind="video", frames=frames, frames_per_second=2.0))
        assert list(item.grid) == [int(each) for each in grid], (height, width)
        assert levels(item.patches, patches, settings) <= VIDEO_LEVELS, (height, width)


@pytest.mark.parametrize(
    "left_out", ["rescale_factor", "resample", "do_resize", "do_rescale", "do_normalize", "size"]
)
def test_a_setting_that_is_left_out_has_their_default(left_out: str, tmp_path: Path) -> None:
    settings = {name: value for name, value in {**COMMON, **BOUNDS}.items() if name != left_out}
    recipe, config = recipe_and_config(tmp_path, settings, settings)
    known = {**COMMON, "rescale_factor": 1 / 255, **settings}
    for kind, (height, width) in product(("image", "video"), ((60, 190), (1150, 1300))):
        frames = noise(1 if kind == "image" else 2, height, width, 3)
        theirs = their_image(settings, frames[0]) if kind == "image" else their_video(settings, frames)
        rate = 2.0 if kind == "video" else None
        item = recipe.preprocess(config, Pixels(kind=kind, frames=frames, frames_per_second=rate))
        assert list(item.grid) == [int(each) for each in theirs[0]], kind
        assert levels(item.patches, theirs[1], known) <= IMAGE_LEVELS, kind


def test_a_unit_other_than_that_of_the_tower_is_refused(tmp_path: Path) -> None:
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        settings = {**COMMON, **BOUNDS, name: COMMON[name] + 2}
        with pytest.raises(CheckpointError, match=name):
            recipe_and_config(tmp_path / name, settings, settings)
    for name in ("patch_size", "image_feature_size"):
        with pytest.raises(CheckpointError, match=name):
            sliced_checkpoint(tmp_path / f"sliced-{name}", "2.6", IMAGE, {**SLICED, name: 15})


PLACES = ("preprocessor_config.json", "processor_config.json", "slice_config", "config.json")


@pytest.mark.parametrize("place", PLACES)
def test_settings_of_slices_are_read_wherever_they_stand(place: str, tmp_path: Path) -> None:
    for name, settings in SLICED_CASES.items():
        if place.startswith("proc") and not settings:
            continue  # an empty section of a combined file is none
        checkpoint, _, config = sliced_checkpoint(tmp_path / name, "2.6", place, settings)
        assert_facts(config, config_facts(checkpoint), name)
        if name == "own names":
            cut = config.cut
            found = [cut.max_cells, cut.side, list(cut.mean), list(cut.std), config.numbered]
            assert found == [5, 84, [0.1, 0.2, 0.3], [0.4, 0.3, 0.2], False]


@pytest.mark.parametrize("version", VERSIONS)
def test_releases_take_videos_where_their_processors_do(version: str, tmp_path: Path) -> None:
    _, recipe, config = sliced_checkpoint(tmp_path, version, "preprocessor_config.json", SLICED)
    film = Pixels(kind="video", frames=noise(2, 84, 84, 3), frames_per_second=1.0)
    if version in ("2.0", "2.5"):
        message = rf"a video given, but release {version} takes images only\. Pass its frames as images"
        with pytest.raises(InputError, match=message):
            recipe.preprocess(config, film)
    else:
        assert recipe.preprocess(config, film).grid == (2, 6, 6)
