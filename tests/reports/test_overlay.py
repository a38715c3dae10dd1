"""The contact sheet shows exactly what was kept."""

from __future__ import annotations

import itertools

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from vlexport.errors import InputError, RequestError, UnsupportedError
from vlexport.reports.overlay import (
    BAR,
    CAPTION,
    DIM,
    GAP,
    LEAST_WIDTH,
    LEGEND,
    LEGEND_HEIGHT,
    PAPER,
    PICTURE_SCALE,
    PICTURE_SIDE,
    SAMPLE,
    SAMPLE_WIDTH,
    TILE_HEIGHT,
    TILE_WIDTH,
    Film,
    _font,
    cell_side,
    contact_sheet,
    films_of,
    tile,
    tile_places,
)
from vlexport.runtime.outputs import MediaReport, check_out
from vlexport.specs import Pixels


def film(seed: int, frames: int, rows: int, columns: int, source: tuple[int, int] = (37, 53)) -> Film:
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (2 * frames, *source, 3), dtype=torch.uint8, generator=random)
    kept = torch.rand(frames, rows, columns, generator=random) < 0.5
    return Film(title="video: some of many tokens kept", frames=pixels, kept=kept, seconds_per_grid=1.0)


def plain(frame: torch.Tensor, rows: int, columns: int) -> np.ndarray:
    side = cell_side(1, rows, columns)
    whole = PIL.Image.fromarray(frame.numpy())
    return np.asarray(whole.resize((columns * side, rows * side), PIL.Image.Resampling.LANCZOS))


def dimmed(whole: np.ndarray) -> np.ndarray:
    grey = np.asarray(PIL.Image.fromarray(whole).convert("L"))
    return np.asarray(grey[..., None] // DIM + np.array(PAPER))


@settings(max_examples=25, deadline=None)
@given(some.integers(0, 1000), some.integers(1, 9), some.integers(1, 40))
def test_every_pixel_of_a_tile_is_as_in_the_mask(seed, rows, columns):
    made = film(seed, 1, rows, columns)
    side = cell_side(1, rows, columns)
    shown = np.asarray(tile(made.frame(0), made.kept[0], side))
    whole = plain(made.frame(0), rows, columns)
    for row in range(rows):
        for column in range(columns):
            cell = np.s_[row * side : (row + 1) * side, column * side : (column + 1) * side]
            expected = whole[cell] if made.kept[0, row, column] else dimmed(whole)[cell]
            assert np.array_equal(shown[cell], expected)


def test_tiles_lie_on_the_sheet_where_they_should_with_their_share_below():
    made = film(7, 9, 3, 5)
    sheet = np.asarray(contact_sheet([made]))
    for index, (left, top) in enumerate(tile_places(made)):
        kept = made.kept[index]
        expected = np.asarray(tile(made.frame(index), kept, cell_side(9, 3, 5)))
        height, width = expected.shape[:2]
        x, y = GAP + left, GAP + top
        assert np.array_equal(sheet[y : y + height, x : x + width], expected)
        bar = (sheet[y + height + 2, x : x + width] == BAR).all(-1)
        assert int(bar.sum()) == round(width * int(kept.sum()) / kept.numel())


@pytest.mark.parametrize(("rows", "columns"), [(200, 1), (1, 200), (60, 2)])
def test_very_tall_and_very_wide_frames_make_tiles_of_a_usual_size_with_room_for_captions(rows, columns):
    made = film(3, 3, rows, columns)
    shown = tile(made.frame(0), made.kept[0], cell_side(3, rows, columns))
    assert shown.size[0] <= max(TILE_WIDTH + columns, 2 * columns)
    assert shown.size[1] <= max(TILE_HEIGHT + rows, 2 * rows)
    corners = tile_places(made)
    across = [
        second - first
        for (first, top), (second, same) in itertools.pairwise(corners)
        if top == same  # very wide tiles lie below each other
    ]
    assert all(step >= LEAST_WIDTH + GAP for step in across)
    longest = f"{rows * columns}/{rows * columns}  100%"
    assert _font(12).getlength(longest) + _font(12).getlength("1000.0 s") <= LEAST_WIDTH


def test_a_picture_is_drawn_larger_than_a_frame_but_no_cell_larger_than_it_is():
    for rows, columns in ((69, 39), (39, 69), (18, 18), (3, 5), (1, 1)):
        picture, frame = cell_side(1, rows, columns), cell_side(2, rows, columns)
        assert frame <= picture <= max(frame, PICTURE_SIDE)
        assert picture == frame or picture * rows <= PICTURE_SCALE * TILE_HEIGHT + rows
        assert picture == frame or picture * columns <= PICTURE_SCALE * TILE_WIDTH + columns
    assert (cell_side(1, 69, 39), cell_side(2, 69, 39)) == (15, 5)


def test_films_lie_below_each_other_and_no_tile_covers_another():
    films = [film(1, 8, 4, 4), film(2, 1, 2, 9)]
    sheet = contact_sheet(films)
    below = LEGEND_HEIGHT + 2 * GAP
    heights = [contact_sheet([each]).height - below for each in films]
    assert sheet.height == sum(heights) + below
    side = cell_side(8, 4, 4)
    corners = tile_places(films[0])
    assert len(set(corners)) == 8
    for left, top in corners:
        near = [(x, y) for x, y in corners if abs(x - left) < 4 * side and abs(y - top) < 4 * side + CAPTION]
        assert near == [(left, top)]


def test_the_legend_below_shows_each_sign_in_its_colour_left_of_its_meaning():
    sheet = np.asarray(contact_sheet([film(1, 1, 2, 2)]))
    legend = sheet[-LEGEND_HEIGHT - GAP : -GAP, GAP:]
    dimmed_sample = dimmed(np.full((1, 1, 3), SAMPLE, np.uint8))[0, 0]
    left = 0
    for words, colour in zip(LEGEND, (SAMPLE, dimmed_sample, BAR), strict=True):
        found = np.argwhere((legend == colour).all(-1))[:, 1]
        assert (found.min(), found.max()) == (left, left + SAMPLE_WIDTH - 1)
        text = int(_font(12).getlength(words))
        texts = (legend != PAPER).any(-1)[:, left + SAMPLE_WIDTH :]
        assert texts[:, GAP // 2 : GAP // 2 + text].any()
        assert not texts[:, : GAP // 2].any()
        assert not texts[:, GAP // 2 + text + 2 : GAP // 2 + text + GAP].any()
        left += SAMPLE_WIDTH + GAP // 2 + text + 1 + GAP
    assert left <= legend.shape[1] + GAP


def test_a_grid_frame_is_shown_by_the_first_of_its_frames():
    for num_frames, shown in ((8, [0, 2, 4, 6]), (7, [0, 2, 4, 6]), (4, [0, 1, 2, 3])):
        frames = torch.arange(num_frames, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 2, 3)
        made = Film(title="", frames=frames, kept=torch.ones(4, 1, 1, dtype=torch.bool))
        assert [int(made.frame(index)[0, 0, 0]) for index in range(4)] == shown


def test_items_of_an_answer_get_their_own_pixels_and_masks_in_prompt_order():
    mask = torch.tensor([True] * 4 + [False, True, False, False])
    media = [
        MediaReport(kind="video", grid=(2, 4, 4), num_tokens=8, num_kept=5, seconds_per_grid=0.5, mask=mask),
        MediaReport(kind="image", grid=(1, 4, 2), num_tokens=2, num_kept=2),
    ]
    image = Pixels(kind="image", frames=torch.zeros(1, 5, 5, 3, dtype=torch.uint8))
    video = Pixels(kind="video", frames=torch.ones(4, 5, 5, 3, dtype=torch.uint8))
    first, second = films_of(media, [image], [video], merge=2, rules={"video": "evs at rate 0.5"})
    assert torch.equal(first.kept.flatten(), mask)
    assert first.kept.shape == (2, 2, 2)
    assert bool(second.kept.all())
    assert (first.frames is video.frames, second.frames is image.frames) == (True, True)
    assert first.title == "video: 5 of 8 tokens kept, 62% (pruned by evs at rate 0.5)"
    assert second.title == "image: 2 of 2 tokens kept, 100% (not pruned)"


def test_nothing_frames_of_another_form_and_a_place_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(InputError, match="nothing to show"):
        contact_sheet([])
    with pytest.raises(InputError, match="grid frames, rows, columns"):
        Film(title="video", frames=torch.zeros(2, 5, 5, 3), kept=torch.ones(4))
    tiles = MediaReport(kind="image", grid=(1, 8, 4), num_tokens=8, num_kept=8, mask=torch.ones(8))
    with pytest.raises(UnsupportedError, match=r"8 tokens of the image are no grid of \(1, 2, 1\)"):
        films_of([tiles], [Pixels(kind="image", frames=torch.zeros(1, 5, 5, 3))], [], 4, {})
    with pytest.raises(RequestError, match=r"ends in \.png"):
        check_out(tmp_path / "sheet.jpg", "--overlay", ".png")
    with pytest.raises(RequestError, match=r"--overlay .*does not exist\. Make it first"):
        check_out(tmp_path / "no" / "sheet.png", "--overlay", ".png")
