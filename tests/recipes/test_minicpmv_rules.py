"""MiniCPM-V: what checkpoints hold about themselves, cuts of images, tables of calls, texts of videos."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.minicpmv4_6.image_processing_minicpmv4_6 import MiniCPMV4_6ImageProcessor
from vlexport.recipes import minicpmv
from vlexport.recipes._minicpmv_reference import resized
from vlexport.recipes.minicpmv import (
    SLOT,
    SliceRule,
    best_cut,
    cell_size,
    check_items,
    cut_of,
    fitted,
    frame_numbers,
    image_text,
    in_groups,
    to_slices,
    video_text,
)

from tests.golden_data import Case, cases
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError, InputError, UnknownModelError
from vlexport.integrations.vllm.models import rows_of_strip
from vlexport.recipe import find_recipe, recipe_for
from vlexport.specs import NAMED_BOUNDS, MediaItem, Pixels, Symbol, check_within
from vlexport.vision import slices
from vlexport.vision.slices import Slice

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
def test_an_unknown_version_is_refused(tmp_path, version):
    checkpoint = checkpoint_of(tmp_path, small("2.6"), version=version)
    message = r"'version' is .*; this recipe serves 2\.0, 2\.5, 2\.6, 4\.0, 4\.5\. Other releases need"
    with pytest.raises(UnknownModelError, match=message):
        RECIPE.read_config(checkpoint)


def test_the_tower_that_the_oldest_release_only_names_is_known(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, small("2.0"), vision_config=None, drop_vision_last_layer=True)
    tower = RECIPE.read_config(checkpoint).tower
    assert (tower.width, tower.depth, tower.heads, tower.inner) == (1152, 26, 16, 4304)
    assert (tower.side, tower.patch) == (27, 14)


@pytest.mark.seconds
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


HALF = (0.5, 0.5, 0.5)
RULE = SliceRule(patch=14, side=448, max_cells=9, mean=HALF, std=HALF)
SMALL = SliceRule(patch=4, side=32, max_cells=9, mean=HALF, std=HALF)
# A later release in transformers: the same rule, with sides rounded to several patches. Its settings need
# torchvision, its rule does not. transformers 5.17 has the rounding of "16x" alone, and no argument for it.
LATER = MiniCPMV4_6ImageProcessor.__new__(MiniCPMV4_6ImageProcessor)
HAS_MODES = "downsample_mode" in inspect.signature(LATER.find_best_resize).parameters
ROUNDED_TO = {"4x": 2, "16x": 4} if HAS_MODES else {"16x": 4}


def sizes(count: int, seed: int) -> list[tuple[int, int]]:
    source = random.Random(seed)
    return [(source.randint(1, 3000), source.randint(1, 3000)) for _ in range(count)]


def test_cuts_agree_with_transformers_where_nothing_ties() -> None:
    for height, width in sizes(500, 1):
        theirs = LATER.get_sliced_grid((height, width), 9, 448)
        assert best_cut((height, width), 448, 9) == (tuple(theirs) if theirs else None)


def later(method: Callable[..., minicpmv.Size], *given: object, mode: str, enlarge: bool) -> minicpmv.Size:
    """Return a size by a method of theirs, for slices of about 448 x 448 and patches of 14."""
    modes = {"downsample_mode": mode} if HAS_MODES else {}
    return method(*given, 448, 14, allow_upscale=enlarge, **modes)


@pytest.mark.parametrize("mode", ROUNDED_TO)
@pytest.mark.parametrize("enlarge", [False, True])
def test_overviews_have_the_size_that_transformers_gives(mode: str, enlarge: bool) -> None:
    # Their sides are multiples of several patches of 14, so one of these is a patch here.
    rule = SliceRule(patch=14 * ROUNDED_TO[mode], side=448, max_cells=9, mean=HALF, std=HALF)
    for size in sizes(500, 2):
        theirs = later(LATER.find_best_resize, size, mode=mode, enlarge=enlarge)
        assert fitted(*size, rule, enlarge=enlarge) == theirs


@pytest.mark.parametrize("mode", ROUNDED_TO)
def test_cells_have_the_size_that_transformers_gives(mode: str) -> None:
    rule = SliceRule(patch=14 * ROUNDED_TO[mode], side=448, max_cells=9, mean=HALF, std=HALF)
    for size in sizes(500, 3):
        cut = best_cut(size, 448, 9)
        if cut is not None:
            height, width = later(LATER.get_refine_size, size, list(cut), mode=mode, enlarge=True)
            assert cell_size(size, cut, rule) == (height // cut[0], width // cut[1])


def test_the_size_of_a_common_image_is_the_published_one() -> None:
    # 1344 x 896 pixels: six cells of 448 x 448 in two rows, an overview of 546 x 364.
    item = to_slices(RULE, Pixels(kind="image", frames=torch.zeros(1, 896, 1344, 3, dtype=torch.uint8)))
    assert item.slices == ((26, 39), *((32, 32),) * 6)
    assert item.grid == (1, 64, 96)
    assert cut_of(item) == (2, 3)


def test_rows_and_images_are_inverses() -> None:
    image = torch.randn(1, 3, 12, 20)
    rows = slices.rows_of_image(image, 4)
    assert torch.equal(slices.image_of_rows(rows, 3, 5, 4), image[0])


PACKED = list(cases("minicpm_tower", "pack"))


def strips_of(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    tables = torch.tensor(case.meta["tgt_sizes"])
    return [case.inputs[f"slice{index}"] for index in range(len(tables))], tables


def test_strips_hold_the_recorded_patches_in_the_recorded_order() -> None:
    for case in (case for case in PACKED if case.meta["navit"]):
        strips, tables = strips_of(case)
        patch, (rows, columns) = case.meta["patch"], case.meta["grid"]
        padded = case.outputs["packed"].reshape(-1, 3, rows * patch, columns * patch)
        counts = tables.prod(-1).tolist()
        for index, found in enumerate(map(rows_of_strip, strips)):
            cells = slices.rows_of_image(padded[index : index + 1], patch)
            assert torch.equal(found, cells[: counts[index]]), case.meta
            assert cells[counts[index] :].abs().sum() == 0, case.meta
        assert padded[len(counts) :].abs().sum() == 0, case.meta


def test_plain_images_can_be_cut_into_rows() -> None:
    for case in (case for case in PACKED if not case.meta["navit"]):
        strips, tables = strips_of(case)
        for image, (rows, columns) in zip(strips, tables.tolist(), strict=True):
            assert len(slices.rows_of_image(image[None], 4)) == rows * columns, case.meta


def test_frames_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InputError, match=r"an image has one frame, 2 given\. Pass it as a video"):
        to_slices(SMALL, Pixels(kind="image", frames=torch.zeros(2, 8, 8, 3, dtype=torch.uint8)))
    with pytest.raises(InputError, match=r"uint8 \[frames, height, width, 3\] expected"):
        to_slices(SMALL, Pixels(kind="image", frames=torch.zeros(1, 8, 8, 3)))


NARROW = SliceRule(patch=2, side=16, max_cells=9, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_position_ids_equal_the_recorded_ones() -> None:
    found = list(cases("minicpm_tower", "position_ids"))
    assert len(found) == 30
    for case in found:
        for row, (rows, columns) in zip(case.outputs["position_ids"], case.meta["tgt_sizes"], strict=True):
            places = places_of(rows, columns)
            if not case.meta["tgt_given"]:
                places = minicpmv.along_line(*places)
            ids = minicpmv.bucket_ids(*places, case.meta["side"])
            assert ids.tolist() == row[: rows * columns].tolist(), case.meta
            assert row[rows * columns :].abs().sum() == 0


def places_of(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells of one slice, and its sides beside each."""
    cells = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).reshape(-1, 2)
    return cells, torch.tensor([[rows, columns]]).expand(len(cells), 2)


@pytest.mark.parametrize("antialias", [False, True])
def test_resize_weights_give_the_resized_table(antialias: bool) -> None:
    torch.manual_seed(0)
    table = torch.randn(49, 5)
    sizes = [(7, 7), (3, 7), (1, 1), (12, 5), (1, 20), (20, 1), (2, 3)]
    cells, sides = map(torch.cat, zip(*(places_of(*size) for size in sizes), strict=True))
    rows_NB, columns_NB = minicpmv.resize_weights(cells, sides, 7, antialias=antialias)
    weights = (rows_NB[:, :, None] * columns_NB[:, None]).flatten(1)
    wanted = [
        resized(table, Slice(start=0, rows=rows, columns=columns, frame=-1), antialias=antialias)
        for rows, columns in sizes
    ]
    # Sums of the same sixteen products in another order: 7e-7 seen.
    torch.testing.assert_close(weights @ table, torch.cat(wanted), rtol=0, atol=3e-6)


def sliced(
    sizes: list[tuple[int, int]], groups: tuple[tuple[int, ...], ...] = (), rows: int | None = None
) -> MediaItem:
    count = sum(down * across for down, across in sizes) if rows is None else rows
    return MediaItem(
        kind="image",
        patches=torch.zeros(count, NARROW.row_width),
        grid=(len(sizes), 1, 1),
        slices=tuple(sizes),
        frame_groups=groups,
    )


def test_items_that_contradict_themselves_are_refused() -> None:
    plain = MediaItem(kind="image", patches=torch.zeros(3, 4, 6), grid=(1, 2, 3))
    counted = r"item 0: \d frame numbers in groups of .* given, 2 expected, one per slice and at least one"
    rows = r"item 0: patches of shape \[7, 12\] given, \[8, 12\] expected"
    pair = [(1, 2), (2, 2)]
    refusals: list[tuple[list[MediaItem], str]] = [
        ([], "no image or video given: at least one is expected"),
        ([sliced([(2, 3), (1, 2)], rows=7)], rf"{rows} for 2 slices of \[\[2, 3\], \[1, 2\]\]"),
        ([sliced([(2, 0)])], r"item 0: slices \[\[2, 0\]\] given"),
        ([plain], r"item 0: plain images of shape \[3, 4, 6\] given, rows of patches \[6, 12\] expected"),
        ([sliced(pair, ((0,),))], counted),
        ([sliced(pair, ((0, 1), (2,)))], counted),
        ([sliced(pair, ((0, 1), ()))], counted),
        ([sliced([(1, 2)], ((-2,),))], "0 or more expected, or -1 for none"),
    ]
    for items, message in refusals:
        with pytest.raises(InputError, match=message):
            check_items(items, NARROW.row_width, timed=True)


def test_numbers_may_be_left_out_and_every_slice_has_a_run_of_its_own() -> None:
    text = image_text(None, (1, 2), 1, cells_apart=True)
    assert text == "<image><unk></image><slice><unk></slice><slice><unk></slice>"
    assert image_text(None, (3, 3), 64, cells_apart=True).count(SLOT * 64) == 10
    assert image_text(None, (3, 3), 64, cells_apart=True).count(SLOT) == 640


def test_a_video_has_a_run_for_each_group_and_no_number() -> None:
    assert video_text(2, 3) == "<image><unk><unk><unk></image><image><unk><unk><unk></image>"


def test_frame_numbers_count_tenths_of_a_second_and_the_last_group_takes_what_is_left() -> None:
    assert frame_numbers(4, 2.0) == (0, 5, 10, 15)
    assert frame_numbers(4, 3.0) == (0, 3, 7, 10)
    assert in_groups((0, 5, 10, 15), 3) == ((0, 5, 10), (15,))
    with pytest.raises(InputError, match=r"frames per second: 0\.0 given, more than 0 expected"):
        frame_numbers(2, 0.0)


@pytest.mark.parametrize("version", ["2.6", "4.0", "4.5"])
def test_frames_of_a_file_have_their_tenths_of_a_second_where_keys_carry_them(version, tmp_path):
    """As published for 4.5: a group for each frame up to 180 frames, then up to three frames share theirs."""
    tiny = Tiny(version=version, depth=1, with_decoder=False)
    config = RECIPE.read_config(checkpoint_of(tmp_path, tiny))

    def groups(frames, **times):
        blank = torch.zeros(frames, 28, 28, 3, dtype=torch.uint8)
        item = RECIPE.preprocess(config, Pixels(kind="video", frames=blank, **times))
        RECIPE.packing(config).check([item])
        return item.frame_groups

    timed = version == "4.5"
    found = groups(3, frames_per_second=2.0, seconds=(0.02, 0.47, 1.66))
    assert found == (((0,), (5,), (17,)) if timed else ())
    assert groups(3, frames_per_second=2.0) == (((0,), (5,), (10,)) if timed else ())
    assert groups(3) == ()
    lengths = [[len(group) for group in groups(frames, frames_per_second=10.0)] for frames in (180, 181, 700)]
    assert lengths == ([[1] * 180, [2] * 90 + [1], [3] * 233 + [1]] if timed else [[]] * 3)
