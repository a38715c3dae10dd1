"""Bounds in pixels as cells: never broken by any frame, and reached by some."""

from __future__ import annotations

import random

import pytest

from vlexport.vision.preprocess import MAX_ASPECT, ResizeRule, least_cells, most_cells, target_size

WIDE_OPEN = ResizeRule(min_pixels=1, max_pixels=2**40)
RULES = (
    WIDE_OPEN,
    ResizeRule(min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
    ResizeRule(min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768),
    ResizeRule(min_pixels=900, max_pixels=3000),
)


def cells(rule: ResizeRule, height: int, width: int, cell: int) -> int:
    rows, columns = target_size(height, width, cell, rule.min_pixels, rule.max_pixels)
    return rows * columns // cell**2


def every_frame(least: int, most: int) -> list[tuple[int, int]]:
    return [
        (height, width)
        for height in range(1, most + 1)
        for width in range(max(height, -(-least // height)), min(most // height, MAX_ASPECT * height) + 1)
    ]


PIXELS = (1, 200, 1000, 4097)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_frame_of_so_many_pixels_has_more_or_fewer_cells(rule):
    for pixels in PIXELS:
        small, large = every_frame(1, pixels), every_frame(pixels, 2 * pixels + 50)
        assert max(cells(rule, *frame, 8) for frame in small) <= most_cells(rule, pixels, 8), pixels
        assert min(cells(rule, *frame, 8) for frame in large) >= least_cells(rule, pixels, 8), pixels


def test_where_the_rule_leaves_the_area_alone_the_bound_is_reached():
    for pixels in (64, *PIXELS[1:]):
        found = max(cells(WIDE_OPEN, *frame, 8) for frame in every_frame(1, pixels))
        assert found == most_cells(WIDE_OPEN, pixels, 8), pixels


def test_it_holds_for_large_frames_too():
    source = random.Random(0)
    for _ in range(3000):
        rule, cell = source.choice(RULES[:3]), source.choice([14, 28])
        height = source.randint(1, 3000)
        width = source.randint(max(1, -(-height // MAX_ASPECT)), min(3000, MAX_ASPECT * height))
        found, area = cells(rule, height, width, cell), height * width
        assert least_cells(rule, area, cell) <= found <= most_cells(rule, area, cell)


def test_a_rule_that_never_resizes_counts_whole_cells():
    rule = ResizeRule(min_pixels=1, max_pixels=1, resize=False)
    assert (least_cells(rule, 1000, 8), most_cells(rule, 1000, 8)) == (16, 15)
