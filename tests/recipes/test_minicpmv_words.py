"""Text of sliced videos, and numbers of their frames; tests/reference has the words of images, by release."""

from __future__ import annotations

import pytest
import torch
from vlexport.recipes.minicpmv import RECIPE, SLOT, SliceWords, frame_numbers, in_groups, video_text

from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError
from vlexport.specs import Pixels


def test_numbers_may_be_left_out_and_every_slice_has_a_run_of_its_own() -> None:
    words = SliceWords(numbered=False, cells_apart=True)
    assert words.image(1, (1, 2), 1) == "<image><unk></image><slice><unk></slice><slice><unk></slice>"
    assert words.image(0, (3, 3), 64).count(SLOT * 64) == 10
    assert words.image(0, (3, 3), 64).count(SLOT) == 640


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
    config = RECIPE.read_config(Checkpoint.open(write_tiny_minicpmv(tmp_path / "tiny", tiny)))

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
