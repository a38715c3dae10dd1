"""Cutting images into slices, by transformers and by records; tests/reference has the rule again."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable

import pytest
import torch
from transformers.models.minicpmv4_6.image_processing_minicpmv4_6 import MiniCPMV4_6ImageProcessor
from vlexport.recipes import minicpmv
from vlexport.recipes.minicpmv import SliceRule, best_cut, cell_size, cut_of, fitted, to_slices

from tests.golden_data import Case, cases
from vlexport.errors import InputError
from vlexport.integrations.vllm.models import rows_of_strip
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
