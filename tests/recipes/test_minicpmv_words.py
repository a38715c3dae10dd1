"""Text of sliced images and videos, word for word, and as many slots as the engine gives rows."""

from __future__ import annotations

import pytest
from vlexport.recipes.minicpmv import SLOT, SliceWords, frame_numbers, in_groups, video_text

from vlexport.errors import InputError

EARLY = SliceWords(numbered=False, cells_apart=False)
LATER = SliceWords(numbered=True, cells_apart=True)


def test_an_image_that_is_not_cut_is_one_run_of_slots() -> None:
    assert EARLY.image(3, None, 2) == "<image><unk><unk></image>"
    assert LATER.image(3, None, 2) == "<image_id>3</image_id><image><unk><unk></image>"


def test_early_cells_stand_between_the_words_of_images_and_share_one_pair_around_them() -> None:
    assert EARLY.image(0, (2, 3), 1) == (
        "<image><unk></image>"
        "<slice><image><unk></image><image><unk></image><image><unk></image>\n"
        "<image><unk></image><image><unk></image><image><unk></image></slice>"
    )


def test_later_cells_have_words_of_their_own() -> None:
    assert LATER.image(1, (2, 2), 1) == (
        "<image_id>1</image_id><image><unk></image>"
        "<slice><unk></slice><slice><unk></slice>\n<slice><unk></slice><slice><unk></slice>"
    )


def test_numbers_may_be_left_out() -> None:
    words = SliceWords(numbered=False, cells_apart=True)
    assert words.image(1, (1, 2), 1) == "<image><unk></image><slice><unk></slice><slice><unk></slice>"


def test_a_video_has_a_run_for_each_group_and_no_number() -> None:
    assert video_text(2, 3) == "<image><unk><unk><unk></image><image><unk><unk><unk></image>"


@pytest.mark.parametrize("words", [EARLY, LATER])
@pytest.mark.parametrize("cut", [None, (1, 2), (3, 3), (9, 1)])
def test_slots_are_as_many_as_rows(words: SliceWords, cut: tuple[int, int] | None) -> None:
    slices = 1 + (cut[0] * cut[1] if cut else 0)
    assert (words.image(0, cut, 64)).count(SLOT) == 64 * slices
    assert words.image(0, cut, 64).count(SLOT * 64) == slices


def test_frame_numbers_count_tenths_of_a_second() -> None:
    assert frame_numbers(4, 2.0) == (0, 5, 10, 15)
    assert frame_numbers(4, 3.0) == (0, 3, 7, 10)


def test_frames_at_no_rate_are_refused() -> None:
    with pytest.raises(InputError, match=r"frames per second: 0\.0 given, more than 0 expected"):
        frame_numbers(2, 0.0)


def test_the_last_group_takes_what_is_left() -> None:
    assert in_groups((0, 5, 10, 15), 3) == ((0, 5, 10), (15,))
