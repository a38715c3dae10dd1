"""Cutting images into slices, by the rule that the published processors have."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.minicpmv4_6.image_processing_minicpmv4_6 import MiniCPMV4_6ImageProcessor
from vlexport.recipes import minicpmv
from vlexport.recipes.minicpmv import SliceRule, best_cut, cell_size, cut_of, fitted, to_slices

from tests.golden_data import Case, cases
from vlexport.errors import InputError
from vlexport.integrations.vllm.schemas import items_of_strips
from vlexport.specs import Pixels
from vlexport.vision import slices

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


def loop_cut(height: int, width: int, side: int, most: int) -> tuple[int, int] | None:
    """The rule word by word: columns ascending inside counts ascending, the first of equals wins."""
    wanted = min(math.ceil(width * height / (side * side)), most)
    if wanted <= 1:
        return None
    best, error = None, float("inf")
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > most:
            continue
        for columns in range(1, count + 1):
            if count % columns:
                continue
            found = abs(math.log(width / height) - math.log(columns / (count // columns)))
            if found < error:
                best, error = (count // columns, columns), found
    return best


def test_cuts_follow_the_rule() -> None:
    for height, width in sizes(2000, 0):
        assert best_cut((height, width), 448, 9) == loop_cut(height, width, 448, 9)


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


def picture(height: int, width: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(height * width))
    rough = generator.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("size", [(40, 100), (300, 200), (61, 61), (9, 31)])
def test_pixels_are_those_of_pil_up_to_one_grey_level(size: tuple[int, int]) -> None:
    image = picture(*size)
    item = to_slices(SMALL, Pixels(kind="image", frames=torch.from_numpy(image.copy())[None]))
    cut = best_cut(size, 32, 9)
    height, width = fitted(*size, SMALL, enlarge=cut is None)
    parts = [np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))]
    if cut is not None:
        rows, columns = cell_size(size, cut, SMALL)
        whole = Image.fromarray(image).resize((columns * cut[1], rows * cut[0]), Image.Resampling.BICUBIC)
        parts += [
            np.asarray(whole.crop((x * columns, y * rows, (x + 1) * columns, (y + 1) * rows)))
            for y in range(cut[0])
            for x in range(cut[1])
        ]
    wanted = [slices.rows_of_image(torch.from_numpy(part.copy()).permute(2, 0, 1)[None], 4) for part in parts]
    # One grey level after dividing by 255 and by the deviation of 0.5; torch and PIL round apart.
    grey = 2 / 255
    levels = (item.patches - (torch.cat(wanted) / 255 - 0.5) / 0.5).abs() / grey
    assert levels.max() < 1.01
    assert (levels > 0.01).float().mean() < 0.02


def test_rows_and_images_are_inverses() -> None:
    image = torch.randn(1, 3, 12, 20)
    rows = slices.rows_of_image(image, 4)
    assert torch.equal(slices.image_of_rows(rows, 3, 5, 4), image[0])


def test_every_frame_of_a_video_is_one_slice() -> None:
    frames = torch.randint(0, 256, (3, 50, 90, 3), dtype=torch.uint8)
    video = to_slices(SMALL, Pixels(kind="video", frames=frames, frames_per_second=4.0))
    stills = [to_slices(SMALL, Pixels(kind="video", frames=frame[None])) for frame in frames]
    assert video.slices == ()
    assert video.grid == (3, *stills[0].grid[1:])
    assert video.seconds_per_grid == 0.25
    assert torch.equal(video.patches, torch.cat([still.patches for still in stills]))


def test_the_cells_of_a_cut_are_those_of_the_whole_image() -> None:
    image = torch.from_numpy(picture(96, 160).copy())[None]
    item = to_slices(SMALL, Pixels(kind="image", frames=image))
    rows, columns = item.slices[-1]
    down, across = cut_of(item) or (0, 0)
    cells = item.patches[math.prod(item.slices[0]) :].split(rows * columns)
    pictures = [slices.image_of_rows(cell, rows, columns, 4) for cell in cells]
    whole = torch.cat([torch.cat(pictures[y * across : (y + 1) * across], 2) for y in range(down)], 1)
    resized = minicpmv._resized(image.permute(0, 3, 1, 2), (rows * down * 4, columns * across * 4))
    torch.testing.assert_close(whole, (resized[0].float() / 255 - 0.5) / 0.5)


PACKED = list(cases("minicpm_tower", "pack"))


def strips_of(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    tables = torch.tensor(case.meta["tgt_sizes"])
    return [case.inputs[f"slice{index}"] for index in range(len(tables))], tables


@pytest.mark.parametrize("case", [case for case in PACKED if case.meta["navit"]])
def test_strips_hold_the_recorded_patches_in_the_recorded_order(case: Case) -> None:
    strips, tables = strips_of(case)
    (item,) = items_of_strips(strips, tables, torch.tensor([len(strips)]))
    patch, (rows, columns) = case.meta["patch"], case.meta["grid"]
    padded = case.outputs["packed"].reshape(-1, 3, rows * patch, columns * patch)
    counts = tables.prod(-1).tolist()
    for index, found in enumerate(item.patches.split(counts)):
        cells = slices.rows_of_image(padded[index : index + 1], patch)
        assert torch.equal(found, cells[: counts[index]])
        assert cells[counts[index] :].abs().sum() == 0
    assert padded[len(counts) :].abs().sum() == 0


@pytest.mark.parametrize("case", [case for case in PACKED if not case.meta["navit"]])
def test_plain_images_are_refused_as_strips_and_can_be_cut_into_rows(case: Case) -> None:
    strips, tables = strips_of(case)
    with pytest.raises(
        InputError, match="Cut plain images into patches, side by side in raster order, first"
    ):
        items_of_strips(strips, tables, torch.tensor([len(strips)]))
    for image, (rows, columns) in zip(strips, tables.tolist(), strict=True):
        assert len(slices.rows_of_image(image[None], 4)) == rows * columns


def test_slice_counts_that_disagree_with_sizes_are_refused() -> None:
    strips = [torch.zeros(3, 4, 24), torch.zeros(3, 4, 8)]
    tables = torch.tensor([[2, 3], [1, 2]])
    with pytest.raises(InputError, match=r"2 slices and 2 sizes given, the images count 1 \+ 2 = 3 slices"):
        items_of_strips(strips, tables, torch.tensor([1, 2]))
    with pytest.raises(InputError, match=r"slice 1: shape \[3, 4, 8\] given, .* expected for 2 x 2 patches"):
        items_of_strips(strips, torch.tensor([[2, 3], [2, 2]]), torch.tensor([2]))


def test_frame_numbers_need_one_entry_per_image() -> None:
    strips = [torch.zeros(3, 4, 24)]
    with pytest.raises(InputError, match="frame numbers of 2 images given, 1 expected"):
        items_of_strips(strips, torch.tensor([[2, 3]]), torch.tensor([1]), [((0,),), ((1,),)])


def test_an_image_of_two_frames_is_refused() -> None:
    with pytest.raises(InputError, match=r"an image has one frame, 2 given\. Pass it as a video"):
        to_slices(SMALL, Pixels(kind="image", frames=torch.zeros(2, 8, 8, 3, dtype=torch.uint8)))


def test_frames_of_another_type_are_refused() -> None:
    with pytest.raises(InputError, match=r"uint8 \[frames, height, width, 3\] expected"):
        to_slices(SMALL, Pixels(kind="image", frames=torch.zeros(1, 8, 8, 3)))
