"""What MiniCPM-V checkpoints hold about themselves, what is read of them, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.slice_mixes import random_item
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError, InputError, UnknownModelError
from vlexport.recipe import find_recipe, recipe_for
from vlexport.specs import NAMED_BOUNDS, MediaItem, Pixels, Symbol, check_within

RECIPE = find_recipe("minicpmv")


def checkpoint_of(folder: Path, tiny: Tiny, **config: object) -> Checkpoint:
    return Checkpoint.open(write_tiny_minicpmv(folder / "checkpoint", tiny, config=config))


def small(version: str) -> Tiny:
    return Tiny(version=version, depth=2, out=32, with_decoder=False)


def test_the_release_is_known_by_its_version_or_by_the_sizes_where_there_is_none(tmp_path: Path) -> None:
    nothing: dict[str, object] = {"version": None}
    known: list[tuple[str, dict[str, object], str]] = [
        ("2.6", {"version": 2.6}, "2.6"),
        ("4.0", {"version": 4}, "4.0"),
        ("2.0", {**nothing, "hidden_size": 2304, "query_num": 64}, "2.0"),
        ("2.0", {**nothing, "hidden_size": 4096, "query_num": 96}, "2.5"),
        ("2.0", {**nothing, "hidden_size": 2304, "query_num": 96}, "2.5"),
    ]
    for number, (tiny, config, version) in enumerate(known):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert RECIPE.read_config(checkpoint_of(folder, small(tiny), **config)).version == version, config


@pytest.mark.parametrize("version", ["3.0", "2.6.1"])
def test_an_unknown_version_is_refused(tmp_path: Path, version: str) -> None:
    checkpoint = checkpoint_of(tmp_path, small("2.6"), version=version)
    message = r"'version' is .*; this recipe serves 2\.0, 2\.5, 2\.6, 4\.0, 4\.5\. Other releases need"
    with pytest.raises(UnknownModelError, match=message):
        RECIPE.read_config(checkpoint)


def test_the_tower_that_the_oldest_release_only_names_is_known(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, small("2.0"), vision_config=None, drop_vision_last_layer=True)
    tower = RECIPE.read_config(checkpoint).tower
    assert (tower.width, tower.depth, tower.heads, tower.inner) == (1152, 26, 16, 4304)
    assert (tower.side, tower.patch) == (27, 14)


def test_the_model_with_speech_is_served_by_the_same_recipe(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, small("2.6"), model_type="minicpmo")
    assert recipe_for(checkpoint).name == "minicpmv"


def test_a_checkpoint_that_does_not_cut_gives_every_image_one_slice(tmp_path: Path) -> None:
    config = RECIPE.read_config(checkpoint_of(tmp_path, small("2.0"), slice_mode=False))
    item = RECIPE.preprocess(
        config, Pixels(kind="image", frames=torch.zeros(1, 400, 300, 3, dtype=torch.uint8))
    )
    assert item.slices == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_of_other_parts_and_of_a_dropped_layer_are_not_read(tmp_path: Path, version: str) -> None:
    tiny = Tiny(version=version, depth=2, out=32, drop_last=True)
    checkpoint = Checkpoint.open(write_tiny_minicpmv(tmp_path / "checkpoint", tiny, others=True))
    config = RECIPE.read_config(checkpoint)
    names = set(RECIPE.weight_names(checkpoint, config).values())
    assert all(name.startswith(("vpm.", "resampler.")) for name in names)
    unread = [name for name in checkpoint.tensor_names() if name.startswith("vpm.") and name not in names]
    layer = "vpm.blocks.1." if version == "2.0" else "vpm.encoder.layers.1."
    assert unread
    assert all(name.startswith((layer, "vpm.head.")) for name in unread)


def test_a_dropped_layer_need_not_be_there(tmp_path: Path) -> None:
    tiny = Tiny(depth=1, out=32, with_decoder=False)
    folder = write_tiny_minicpmv(tmp_path / "checkpoint", tiny)
    config = (folder / "config.json").read_text()
    config = config.replace('"num_hidden_layers": 1', '"num_hidden_layers": 2')
    config = config.replace('"drop_vision_last_layer": false', '"drop_vision_last_layer": true')
    (folder / "config.json").write_text(config)
    tower = RECIPE.tower(Checkpoint.open(folder), "float32")
    assert sum(name.endswith("mlp.fc1.weight") for name in tower.state_dict()) == 1


def test_a_missing_tensor_is_named_as_the_checkpoint_calls_it(tmp_path: Path) -> None:
    folder = write_tiny_minicpmv(tmp_path / "checkpoint", small("2.6"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["vpm.post_layernorm.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 of 37 .* below 'vpm\.': vpm\.post_layernorm\.bias"):
        RECIPE.tower(Checkpoint.open(folder), "float32")


def test_a_key_projection_is_there_only_between_different_widths(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, small("2.6"))
    names = RECIPE.weight_names(checkpoint, RECIPE.read_config(checkpoint))
    assert "resampler.kv_proj.weight" not in names
    wide = Tiny(depth=1, out=64, with_decoder=False)
    (tmp_path / "wide").mkdir()
    checkpoint = checkpoint_of(tmp_path / "wide", wide)
    assert "resampler.kv_proj.weight" in RECIPE.weight_names(checkpoint, RECIPE.read_config(checkpoint))


def test_frame_numbers_are_refused_by_releases_without_them(tmp_path: Path) -> None:
    config = RECIPE.read_config(checkpoint_of(tmp_path, small("2.6")))
    item = MediaItem(kind="video", patches=torch.zeros(8, 588), grid=(2, 2, 2), frame_groups=((0, 1),))
    with pytest.raises(InputError, match="this checkpoint has no place for them"):
        RECIPE.prepare(config, [item], "grouped")


@pytest.mark.parametrize("name", sorted(NAMED_BOUNDS))
def test_named_profiles_hold_the_largest_calls_that_they_name(tmp_path: Path, name: str) -> None:
    """Largest square images and frames, and wide ones of the same area."""
    config = RECIPE.read_config(checkpoint_of(tmp_path, small("2.6")))
    bounds, profile = NAMED_BOUNDS[name], RECIPE.profiles(config)[name]
    side = int(bounds.max_pixels**0.5)
    media = [
        RECIPE.preprocess(config, Pixels(kind=kind, frames=torch.zeros(frames, *size, 3, dtype=torch.uint8)))
        for kind, count, frames in (("image", bounds.max_images, 1), ("video", 1, bounds.max_frames))
        for size in ((side, side), (side // 2, side * 2))
        for _ in range(count // 2)
        if frames
    ]
    inputs = RECIPE.prepare(config, media, "grouped")
    axes = RECIPE.axes(config, "grouped")
    sizes = {
        dim: inputs[part].shape[axis]
        for part in ("patches", "group_inverse", "slice_runs", "group_runs")
        for axis, dim in axes[part].items()
        if isinstance(dim, Symbol)
    }
    check_within(profile, sizes)


def test_pixels_reach_the_engine_in_the_order_of_the_items(tmp_path: Path) -> None:
    config = RECIPE.read_config(checkpoint_of(tmp_path, small("2.6")))
    items = [random_item(random.Random(seed), config.cut, timed=False) for seed in range(4)]
    inputs = RECIPE.prepare(config, items, "grouped")
    assert torch.equal(inputs["patches"], torch.cat([item.patches for item in items]))
    assert all(table.dtype == torch.int32 for name, table in inputs.items() if name != "patches")
