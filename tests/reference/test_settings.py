"""Every setting of preprocessing, none at its default, in both spellings: by transformers' processors."""

from __future__ import annotations

import importlib
import json
import random
import shutil
from collections.abc import Mapping
from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vlexport.recipes.demo.qwen3_vl import Tiny, processor_json
from vlexport.recipes.demo.qwen3_vl import contents as qwen3_contents
from vlexport.recipes.demo.writing import write_checkpoint

from tests.reference.processors import their_image, their_video, video_class
from tests.reference.slice_config import SLICED, SLICED_CASES, assert_facts, config_facts, sliced_checkpoint
from tests.tiny_minicpmv import VERSIONS
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError, InputError
from vlexport.recipe import find_recipe, recipe_for
from vlexport.specs import Pixels
from vlexport.vision.preprocess import ResizeRule, least_cells, most_cells, resize_rule, volume_size

IMAGE, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
# Images: PIL keeps weights in 22 bits, torch in 16, and both round to bytes after each pass: one level.
# Videos: one kernel on both sides, float32 against float64 normalisation: 1e-3 of a level.
IMAGE_LEVELS, VIDEO_LEVELS = 1.01, 0.01
# Float32 beside float64 on the same bytes.
SAME_PIXELS = 1e-5

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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "minicpmv"])
def test_pixels_are_the_bytes_of_engines_that_take_these_less_the_mean_by_the_deviation(family, tmp_path):
    if family == "minicpmv":
        checkpoint, recipe, config = sliced_checkpoint(tmp_path, "2.6", IMAGE, SLICED)
        mean, std, scale = SLICED["norm_mean"], SLICED["norm_std"], 1 / 255
    else:
        settings = {**COMMON, **BOUNDS}
        recipe, config = recipe_and_config(tmp_path, settings, settings)
        checkpoint = Checkpoint.open(tmp_path / "checkpoint")
        mean, std, scale = (COMMON[name] for name in ("image_mean", "image_std", "rescale_factor"))
    image = Pixels(kind="image", frames=noise(1, 84, 112, 3))
    pixels = recipe.preprocess(config, image).patches
    stored = recipe.preprocess(recipe.read_config(checkpoint, "uint8"), image).patches
    assert (pixels.dtype, stored.dtype) == (torch.float32, torch.uint8)
    centre, size = (torch.tensor(values).double()[:, None] for values in (mean, std))
    wanted = ((stored.unflatten(1, (3, -1)).double() * scale - centre) / size).flatten(1)
    torch.testing.assert_close(pixels.double(), wanted, rtol=0, atol=SAME_PIXELS)


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


@pytest.mark.parametrize("left_out", [*COMMON, "size"])
def test_a_setting_that_is_left_out_has_their_default(left_out: str, tmp_path: Path) -> None:
    settings = {name: value for name, value in {**COMMON, **BOUNDS}.items() if name != left_out}
    recipe, config = recipe_and_config(tmp_path, settings, settings)
    known = {**COMMON, "rescale_factor": 1 / 255, "image_std": video_class().image_std, **settings}
    for kind, (height, width) in product(("image", "video"), ((60, 190), (1150, 1300))):
        frames = noise(1 if kind == "image" else 2, height, width, 3)
        theirs = their_image(settings, frames[0]) if kind == "image" else their_video(settings, frames)
        rate = 2.0 if kind == "video" else None
        item = recipe.preprocess(config, Pixels(kind=kind, frames=frames, frames_per_second=rate))
        assert list(item.grid) == [int(each) for each in theirs[0]], kind
        assert levels(item.patches, theirs[1], known) <= IMAGE_LEVELS, kind


# Settings of steps that processors of these families make in one way, whatever the file has: refused if they
# have another value. Kimi's, MiniCPM-V's and Nemotron's own code: image_processing_kimi_vl.py,
# image_processing_minicpmv.py, image_processing.py and video_processing of nemotron_h_omni.
STEPS: dict[str, Any] = {
    "do_resize": False, "resample": 2, "do_rescale": False, "rescale_factor": 1 / 128, "do_normalize": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def of_family(tmp_path_factory):
    """Return the config of a demo checkpoint with one of its processors' files changed."""

    @cache
    def written(name: str) -> Path:
        contents = importlib.import_module(f"vlexport.recipes.demo.{name}").contents()
        path: Path = write_checkpoint(tmp_path_factory.mktemp("demo") / name, contents, seed=0)
        return path

    def config(name: str, folder: Path, change: dict[str, Any], *, drop: str = "", file: str = IMAGE) -> Any:
        path = shutil.copytree(written(name), folder / "tiny")
        kept = path / file
        settings = json.loads((kept if kept.exists() else path / IMAGE).read_text())
        settings = {key: each for key, each in settings.items() if key != drop} | change
        kept.write_text(json.dumps(settings))
        return find_recipe(name).read_config(Checkpoint.open(path))

    return config


@pytest.mark.parametrize("name", ["kimi_vl", "minicpmv", "nemotron_vl"])
def test_settings_of_steps_that_have_none_are_refused_unless_they_say_what_is_done(
    of_family, name, tmp_path, subtests
):
    done = {
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
    }
    whole = of_family(name, tmp_path / "done", done)
    assert whole == of_family(name, tmp_path / "plain", {})
    files = [IMAGE, VIDEO] if name == "nemotron_vl" else [IMAGE]
    for (key, value), file in product(STEPS.items(), files):
        with subtests.test(f"{file} {key}"), pytest.raises(CheckpointError, match=key):
            of_family(name, tmp_path / file / key, {key: value}, file=file)


def test_settings_that_files_leave_out_are_those_of_the_families_own_code(of_family, tmp_path, subtests):
    """Kimi: 4096 patches, halves. MiniCPM-V: 9 slices of 448 pixels, halves. Nemotron: CLIP's levels."""
    clip = video_class()
    tables: dict[str, dict[str, Any]] = {
        "kimi_vl": {
            "image_mean": ("rule.mean", (0.5,) * 3),
            "image_std": ("rule.std", (0.5,) * 3),
            "in_token_limit": ("rule.image.max_pixels", 4096 * 14**2),
        },
        "minicpmv": {
            "max_slice_nums": ("cut.max_cells", 9),
            "scale_resolution": ("cut.side", 448),
            "image_mean": ("cut.mean", (0.5,) * 3),
            "image_std": ("cut.std", (0.5,) * 3),
        },
        "nemotron_vl": {
            "norm_mean": ("rule.mean", tuple(clip.image_mean)),
            "norm_std": ("rule.std", tuple(clip.image_std)),
            "min_num_patches": ("rule.image.min_pixels", 1024 * 16**2),
            "max_num_patches": ("rule.image.max_pixels", None),
            "video_target_num_patches": ("rule.video.max_pixels", 1024 * 16**2),
            "video_maintain_aspect_ratio": ("square", False),
        },
    }
    for name, table in tables.items():
        for key, (field, value) in table.items():
            with subtests.test(f"{name} {key}"):
                found = of_family(name, tmp_path / name / key, {}, drop=key)
                if value is not None:
                    assert reduce(getattr, field.split("."), found) == value


def test_levels_that_the_files_of_qwen3_vl_leave_out_are_refused_where_its_two_processors_differ(tmp_path):
    """Its images are then CLIP's, its videos halves; named for both they are taken."""
    names = ("image_mean", "image_std")
    path = write_checkpoint(tmp_path / "tiny", qwen3_contents(), seed=0)
    for file in (IMAGE, VIDEO):
        kept = path / file if (path / file).exists() else path / IMAGE
        settings = {key: each for key, each in json.loads(kept.read_text()).items() if key not in names}
        (path / file).write_text(json.dumps(settings))
    recipe = find_recipe("qwen3_vl")
    with pytest.raises(CheckpointError, match="normalised or resampled differently"):
        recipe.read_config(Checkpoint.open(path))
    assert list(video_class("qwen3_vl").image_mean) == [0.5] * 3
    (path / IMAGE).write_text(
        json.dumps(
            {**json.loads((path / IMAGE).read_text()), "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        )
    )
    assert recipe.read_config(Checkpoint.open(path)).rule.mean == (0.5,) * 3


@pytest.mark.seconds
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


CELL = 32 * 32
EDGES = {"shortest_edge": CELL, "longest_edge": 96 * CELL}
VOLUMES: dict[str, dict[str, Any]] = {
    "large": {"size": {**EDGES, "shortest_edge": 4096}},
    "grown": {"size": {**EDGES, "shortest_edge": 40 * CELL}},
    "shrunk": {"size": {**EDGES, "longest_edge": 14 * CELL}},
    "capped": {"size": EDGES, "cap_pixels_per_frame": True, "max_video_tokens": 3},
    "capped by default tokens": {"size": EDGES, "cap_pixels_per_frame": True},
    "cap given and off": {"size": EDGES, "cap_pixels_per_frame": False, "max_video_tokens": 3},
}
# Frames, height and width: odd counts round to even, sides below one cell grow first.
FILMS = ((2, 64, 96), (3, 40, 130), (5, 20, 45), (7, 100, 31), (6, 190, 60), (4, 10, 300))


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    tiny = Tiny(depth=1, levels=(0,), with_decoder=False)
    return Checkpoint.open(
        write_checkpoint(tmp_path_factory.mktemp("words") / "tiny", qwen3_contents(tiny), seed=0)
    )


@pytest.mark.parametrize("name", VOLUMES)
def test_videos_by_volume_are_those_of_their_processor(name: str, spelled: Checkpoint, tmp_path) -> None:
    settings = {**processor_json("video"), **VOLUMES[name]}
    copy = shutil.copytree(spelled.path, tmp_path / "copy")
    (copy / "video_preprocessor_config.json").write_text(json.dumps(settings))
    recipe = recipe_for(spelled)
    config = recipe.read_config(Checkpoint.open(copy))
    for frames, height, width in FILMS:
        source = torch.Generator().manual_seed(frames)
        film = torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8, generator=source)
        grid, patches = their_video(settings, film, "qwen3_vl")
        item = recipe.preprocess(config, Pixels(kind="video", frames=film, frames_per_second=2.0))
        assert list(item.grid) == [int(each) for each in grid], (frames, height, width)
        torch.testing.assert_close(item.patches.double(), patches.double(), rtol=0, atol=SAME_PIXELS)


def test_bounds_that_are_left_out_are_their_defaults() -> None:
    theirs = video_class("qwen3_vl")()
    config = resize_rule({"cap_pixels_per_frame": True}, (128 * CELL, 768 * CELL), 768, 2)
    found = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    assert (found, config.video_tokens) == (theirs.size, theirs.max_video_tokens)


def test_sizes_by_volume_are_theirs() -> None:
    smart_resize = video_class("qwen3_vl").resize.__globals__["smart_resize"]
    draw = random.Random(0)
    for _ in range(3000):
        frames, height, width = draw.randint(2, 40), draw.randint(8, 700), draw.randint(8, 700)
        low = draw.choice((CELL, 128 * CELL))
        rule = ResizeRule(min_pixels=low, max_pixels=draw.choice((400, 24576)) * CELL, frames=2)
        theirs = smart_resize(
            frames, height, width, 2, 32, min_pixels=rule.min_pixels, max_pixels=rule.max_pixels
        )
        assert volume_size(frames, height, width, 32, rule) == theirs, (frames, height, width)


def test_no_video_has_more_or_fewer_tokens_than_its_profile_counts() -> None:
    draw, cell = random.Random(1), 32
    for _ in range(4000):
        frames, height = draw.choice((1, 2, 3, 4, 5, 9, 40)), draw.randint(1, 600)
        width = draw.randint(max(1, -(-height // 190)), min(600, 190 * height))
        low, high = draw.choice(((1, 4), (40, 96), (4, 24576), (300, 301)))
        rule = ResizeRule(min_pixels=low * CELL, max_pixels=high * CELL, frames=2)
        rows, columns = volume_size(frames, height, width, cell, rule)
        area, groups, found = height * width, -(-frames // 2), rows * columns // cell**2
        assert found <= most_cells(rule, area, cell), (frames, height, width, rule)
        assert groups * found >= least_cells(rule, area, cell), (frames, height, width, rule)


def test_the_table_of_a_half_precision_tower_is_resized_in_float32(spelled: Checkpoint) -> None:
    """Rounded shares are lost in the noise of a tower, and add to it."""
    recipe: Any = recipe_for(spelled)
    config = recipe.read_config(spelled)
    items = [recipe.item(config, "image", (1, 14, 22), torch.zeros(14 * 22, recipe.row_width(config)))]
    tables = recipe.prepare(config, items, "grouped")
    half, whole = recipe.tower(spelled, "bfloat16"), recipe.tower(spelled, "float32")
    whole.pos_embed.weight.data = half.pos_embed.weight.data.float()
    found, wanted = (each.places(tables["positions"], tables["sides"]) for each in (half, whole))
    assert torch.equal(found, wanted)
