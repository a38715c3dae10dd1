"""Profiles side by side in one engine."""

from vlexport.specs import Range, ShapeProfile, Symbol, union

ROWS, FRAMES = Symbol("rows"), Symbol("frames")
SMALL = ShapeProfile("small", {ROWS: Range(2, 4, 8), FRAMES: Range(1, 1, 1)})
LARGE = ShapeProfile("large", {ROWS: Range(4, 64, 128), FRAMES: Range(1, 2, 16)})


def test_one_profile_is_itself():
    assert union([SMALL]) is SMALL


def test_several_reach_from_the_smallest_to_the_largest_and_keep_the_first_as_usual():
    together = union([SMALL, LARGE])
    assert together.name == "small+large"
    assert together.ranges == {ROWS: Range(2, 4, 128), FRAMES: Range(1, 1, 16)}
