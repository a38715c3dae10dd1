"""Guards of mismatches that would pass silently: each is reached, and the next right value is taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from vlexport.recipes.minicpmv import MOST_CELLS, MOST_SIDE, Config, SliceRule

from vlexport.errors import CheckpointError, InputError, UnsupportedError
from vlexport.positions.rules import check_placements
from vlexport.runtime.preprocess import _check_kept, check_rows
from vlexport.specs import Dim, MediaBounds, Multiple, Pixels, Range, Symbol, TensorSpec, bind
from vlexport.vision.attention.kernels import _attend_runs, bounded_attention
from vlexport.vision.features.pixels import longest_edge_rule, patch_count_rule, whole
from vlexport.vision.preprocess import HALVES, MOST_MIN_PIXELS, ResizeRule, patch_rule
from vlexport.vision.slices import rows_of_image
from vlexport.vision.static_shapes import doubling, refill
from vlexport.vision.tower import with_fp32_layers

ROWS = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(0))
NUMBERS = (0.1, 0.2, 0.3)


def runs(*of: tuple[int, int, int]) -> object:
    return _attend_runs(ROWS, ROWS, ROWS, of, 1.0)


def slices(**changes: int) -> SliceRule:
    return SliceRule(**{"patch": 14, "side": 448, "max_cells": 9, **changes}, mean=NUMBERS, std=NUMBERS)


def sizes(*shape: int, second: int | None = None) -> object:
    rows: Dim = Symbol("rows")
    specs = (
        TensorSpec(name="one", dtype="float32", shape=(Multiple(4, Symbol("rows")), 6)),
        TensorSpec(name="two", dtype="int32", shape=(rows,)),
    )
    return bind(specs, {"one": shape, **({} if second is None else {"two": (second,)})})


def settings(**video: object) -> object:
    image = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    return patch_rule(image, video, patch=14, merge=2, temporal=2)


def processor(**image: object) -> object:
    return patch_rule(image, {}, patch=14, merge=2, temporal=2)


def frames(*seconds: float, rate: float | None = None) -> object:
    blank = torch.zeros(2, 1, 1, 3, dtype=torch.uint8)
    return Pixels(kind="video", frames=blank, seconds=seconds, frames_per_second=rate)


def refilled(used: int, padding: Any = "zero") -> object:
    refill(buffer := torch.zeros(4), torch.ones(used), padding)
    return buffer


# Right, then wrong with the class and the words of the refusal.
TABLE: dict[str, tuple[Callable[[], object], list[tuple[Callable[[], object], type[Exception], str]]]] = {
    "runs": (
        lambda: runs((2, 3, 3)),
        [(lambda: runs((2, 2, 2)), ValueError, "runs cover 4 query and 4 key rows, 6 and 6 given"),
         (lambda: runs((1, 3, 6)), ValueError, "runs cover 3 query and 6 key rows")],
    ),
    "segments": (
        lambda: bounded_attention(ROWS, ROWS, ROWS, torch.tensor([0, 3, 6]), 3, 1.0),
        [(lambda: bounded_attention(ROWS, ROWS, ROWS, torch.tensor([0, 4, 6]), 3, 1.0), InputError,
          "a segment of 4 rows given, 3 at most")],
    ),
    "slices": (
        lambda: (slices(), slices(side=MOST_SIDE), slices(max_cells=MOST_CELLS), slices(patch=448)),
        [(partial(slices, **each), InputError, "patches that fit") for each in (
            {"patch": 0}, {"patch": 449}, {"side": MOST_SIDE + 1}, {"max_cells": 0},
            {"max_cells": MOST_CELLS + 1})],
    ),
    "releases": (
        lambda: None,
        [(lambda: Config(version="9.9", depth=1, tower=None, cut=slices(), numbered=True), InputError,
          "version '9.9' given")],
    ),
    "bounds of a resize": (
        lambda: (ResizeRule(min_pixels=4, max_pixels=4),
                 ResizeRule(min_pixels=MOST_MIN_PIXELS, max_pixels=MOST_MIN_PIXELS)),
        [(partial(ResizeRule, min_pixels=each[0], max_pixels=each[1]), InputError, "0 < min <= max")
         for each in ((0, 4), (5, 4), (MOST_MIN_PIXELS + 1, 2**30))],
    ),
    "bounds of media": (
        lambda: (MediaBounds(min_pixels=9, max_pixels=9), MediaBounds(max_images=0, max_frames=1)),
        [(lambda: MediaBounds(min_pixels=10, max_pixels=9), InputError, "1 <= min <= max"),
         (lambda: MediaBounds(min_pixels=0), InputError, "1 <= min <= max"),
         (lambda: MediaBounds(max_images=0, max_frames=0), InputError, "at least one image or frame"),
         (lambda: MediaBounds(max_images=-1, max_frames=3), InputError, "no negative numbers"),
         (lambda: Range(2, 1, 3), InputError, "1 <= min <= opt <= max"),
         (lambda: Range(1, 4, 3), InputError, "1 <= min <= opt <= max")],
    ),
    "two processors": (
        lambda: (settings(), settings(rescale_factor=1 / 255), processor(patch_size=14)),
        [*((partial(settings, **each), CheckpointError, "normalised or resampled differently")
           for each in ({"image_mean": [0.5] * 3}, {"image_std": [0.5] * 3}, {"rescale_factor": 1 / 128},
                        {"resample": 2}, {"do_normalize": False}, {"do_rescale": False})),
         *((partial(processor, **each), CheckpointError, "but the tower has")
           for each in ({"patch_size": 16}, {"merge_size": 3}, {"temporal_patch_size": 1})),
         *((partial(processor, **each), CheckpointError, "three values each")
           for each in ({"image_mean": [0.5] * 2}, {"image_std": None})),
         (lambda: processor(size={"shortest_edge": 100, "longest_edge": 50}), CheckpointError, "min <= max"),
         (lambda: processor(resample=1), CheckpointError, "bicubic")],
    ),
    "times of frames": (
        lambda: (frames(), frames(0.0, 1.0)),
        [*((partial(frames, *each), InputError, "seconds of frames")
           for each in ((0.0,), (0.0, 1.0, 2.0), (0.0, -1.0), (0.0, float("nan")), (0.0, float("inf")))),
         *((partial(frames, rate=each), InputError, "frames per second")
           for each in (0.0, -1.0, float("nan")))],
    ),
    "kinds of frames": (
        lambda: Pixels(kind="image", frames=torch.zeros(1, 1, 1, 3, dtype=torch.uint8)),
        [(lambda: Pixels(kind="audio", frames=torch.zeros(1, 1, 1, 3, dtype=torch.uint8)), InputError,
          "frames of kind 'audio' given, 'image' or 'video' expected")],
    ),
    "shapes of inputs": (
        lambda: sizes(8, 6, second=2),
        [(lambda: sizes(8, 6), InputError, "input 'two' is missing"),
         (lambda: sizes(8, second=2), InputError, "shape"),
         (lambda: sizes(8, 7, second=2), InputError, "shape"),
         (lambda: sizes(9, 6, second=2), InputError, "9 is not a multiple of 4"),
         (lambda: sizes(8, 6, second=3), InputError, "rows is 3 here and 2 in an earlier input")],
    ),
    "placeholders": (
        lambda: check_placements([(0, 2), (2, 3)], 5),
        [(lambda: check_placements([(0, 0)], 5), InputError, "length 0"),
         (lambda: check_placements([(0, 2), (1, 3)], 5), InputError, "begins before column 2"),
         (lambda: check_placements([(0, 2), (2, 3)], 4), InputError, "ends at 5, the prompt has 4")],
    ),
    "pictures in patches": (
        lambda: rows_of_image(torch.zeros(1, 3, 8, 4), 4),
        [(lambda: rows_of_image(torch.zeros(1, 3, 8, 6), 4), InputError, "multiples of 4"),
         (lambda: rows_of_image(torch.zeros(1, 3, 6, 4), 4), InputError, "multiples of 4")],
    ),
    "captured buffers": (
        lambda: (refilled(4), refilled(1, "repeat_last"), doubling(3, 3)),
        [(lambda: refilled(5), InputError, "5 rows given, the buffer holds 4"),
         (lambda: refilled(0, "repeat_last"), InputError, "no boundaries"),
         (lambda: doubling(4, 3), InputError, "smallest <= largest"),
         (lambda: doubling(0, 3), InputError, "smallest")],
    ),
    "processors of classes": (
        lambda: (longest_edge_rule({**HALVES, "size": {"longest_edge": 64}}, patch=14, merge=1),
                 patch_count_rule({**HALVES, "patch_size": 16}, patch=16), whole({"x": torch.ones(1)}, "x")),
        [(lambda: longest_edge_rule({"size": {"shortest_edge": 64}}, patch=14, merge=1), CheckpointError,
          "longest_edge"),
         (lambda: patch_count_rule({"patch_size": 14}, patch=16), CheckpointError, "patch_size 14 given"),
         (lambda: whole({"y": torch.ones(1)}, "x"), InputError, "no 'x', but y"),
         (lambda: whole({"x": [1]}, "x"), InputError, "no 'x'")],  # type: ignore[dict-item]
    ),
    "rows of an engine": (
        lambda: [each() for each in (
            partial(check_rows, "rows", torch.zeros(2, 3), 3),
            partial(check_rows, "rows", torch.zeros(2, 3).byte(), 3, in_bytes=True),
            partial(_check_kept, torch.tensor([0, 2, 3]), 4))],
        [(lambda: check_rows("rows", torch.zeros(2, 3), 3, in_bytes=True), InputError, "uint8 expected"),
         (lambda: check_rows("rows", torch.zeros(2, 3).byte(), 3), InputError, "uint8 given"),
         (lambda: check_rows("rows", torch.zeros(2, 4), 3), InputError, r"\[rows, 3\] expected"),
         *((partial(_check_kept, torch.tensor(kept), 4), InputError, "ascending int64 indices below 4")
           for kept in ([], [0, 0, 1], [1, 0], [-1, 2], [0, 4], [0.0]))],
    ),
    "float32 layers": (
        lambda: None,
        [(lambda: with_fp32_layers(nn.Linear(1, 1), "float16", ()), UnsupportedError,
          "a StagedTower is expected")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_a_mismatch_is_refused_and_what_fits_is_taken(name, subtests):
    right, wrong = TABLE[name]
    right()
    for number, (call, kind, words) in enumerate(wrong):
        with subtests.test(number), pytest.raises(kind, match=words):
            call()
