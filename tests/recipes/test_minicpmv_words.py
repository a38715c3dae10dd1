"""Text of sliced videos, and numbers of their frames; tests/reference has the words of images, by release."""

from __future__ import annotations

import pytest
from vlexport.recipes.minicpmv import SLOT, SliceWords, frame_numbers, in_groups, video_text

from vlexport.errors import InputError


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
