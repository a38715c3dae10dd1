"""Which sizes of a sliced call vary, how far, what attention costs, and shapes that show faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from vlexport.specs import Dim, MediaBounds, MediaItem, Range, ShapeProfile, Symbol
from vlexport.vision.segments import attention_work
from vlexport.vision.shelves import SHELVES, ShelfNames
from vlexport.vision.slice_forms import (
    FORMS,
    GROUP_BOUNDS,
    GROUP_SHELVES,
    GROUPS,
    SLICE_BOUNDS,
    SLICE_SHELVES,
    Counts,
)
from vlexport.vision.slice_tables import NO_TIME, frame_numbers, groups_of, in_groups, pack
from vlexport.vision.slices import SliceRule

PATCHES = Symbol("patches")
Mixes = dict[str, list[tuple[str, tuple[int, int, int]]]]
# Sides are rounded to whole patches, so a slice may come out above its area; more only for long strips.
ROUNDING = 9 / 8


def table_axes(queries: int, form: str) -> Mapping[str, Mapping[int, Dim]]:
    """Which axes of patches, tables and `embeds` vary, and how they hang together."""
    integers = ("order", "position_ids", "cells", "frames")
    weights = ("row_weights", "column_weights", "key_row_weights", "key_column_weights")
    return {
        **{name: {0: PATCHES} for name in ("patches", *integers, *weights)},
        **FORMS[form].axes(),
        "embeds": {0: queries * GROUPS},
    }


def any_mix() -> ShapeProfile:
    """Whatever fits a call of 262,144 patches; groups of one run are equal in length, so 723 fill it."""
    patches, length = Range(1, 8192, 262144), Range(1, 1024, 262144)
    return _profile(
        "any",
        Counts(
            patches=patches,
            slices=Range(1, 8, 4096),
            groups=Range(1, 8, 4096),
            slice_patches=length,
            group_patches=length,
            slice_runs=Range(1, 2, 4096),
            group_runs=Range(1, 2, 723),
        ),
    )


def _profile(name: str, counts: Counts) -> ShapeProfile:
    """The ranges of every form."""
    ranges = {PATCHES: counts.patches, GROUPS: counts.groups}
    for form in FORMS.values():
        ranges |= form.ranges(counts)
    return ShapeProfile(name, ranges)


def bounded(name: str, bounds: MediaBounds, rule: SliceRule) -> ShapeProfile:
    """The profile of calls within these bounds; a slice has about the same area whatever it shows."""
    wanted = math.ceil(bounds.max_pixels / rule.side**2)
    cells = min(wanted + 1, rule.max_cells) if min(wanted, rule.max_cells) > 1 else 0
    slices = bounds.max_images * (1 + cells) + bounds.max_frames
    most = most_patches(rule)
    # The overview and the cells of an image differ in size; the frames of a video do not.
    runs = max(1, bounds.max_images * (2 if cells else 1) + bounds.max_frames)
    usual = min(slices, 1 + cells)
    # Frames that share their tokens are one group.
    together = max(1, bounds.max_frames)
    return _profile(
        name,
        Counts(
            patches=Range(1, most * usual, most * slices),
            slices=Range(1, usual, slices),
            groups=Range(1, usual, slices),
            slice_patches=Range(1, most, most),
            group_patches=Range(1, most, most * together),
            slice_runs=Range(1, min(runs, 2), runs),
            group_runs=Range(1, min(runs, 2), runs),
        ),
    )


def capture_sizes(rule: SliceRule, groups: int, slices: int) -> dict[Symbol, int]:
    """Sizes of the one call that serves so many groups of one slice each, or more slices that are smaller."""
    groups = max(1, groups)
    return {
        PATCHES: groups * most_patches(rule),
        GROUPS: groups,
        SLICE_BOUNDS: max(groups, slices) + 1,
        GROUP_BOUNDS: groups + 1,
    }


def most_patches(rule: SliceRule) -> int:
    """Of one slice that is no long strip."""
    return math.ceil((rule.side / rule.patch) ** 2 * ROUNDING)


def score_counts(media: Sequence[MediaItem], queries: int, form: str) -> dict[str, tuple[int, int]]:
    """Score entries per head, (computed, needed), of one block and of the resampler."""
    groups = groups_of(media)
    packed = pack(groups)
    lengths = [each.length for group in groups for each in group]
    if form == "rows":
        tables = FORMS[form].tables(packed, queries)
        slices = sum(rows * length**2 for rows, length in _shelf_sizes(tables, SLICE_SHELVES))
        keys = sum(rows * length for rows, length in _shelf_sizes(tables, GROUP_SHELVES))
    else:
        slices, keys = attention_work(packed.runs_R2), int(packed.group_keys_R2.prod(dim=-1).sum())
    return {
        "slice": (slices, sum(length**2 for length in lengths)),
        "resampler": (keys * queries, sum(lengths) * queries),
    }


def _shelf_sizes(tables: Mapping[str, Tensor], names: ShelfNames) -> list[tuple[int, int]]:
    """(rows, patches of a row) of every shelf."""
    sizes = (tables[f"{names.segment}_cells_{shelf}"].shape for shelf in SHELVES)
    return [(rows, length) for rows, length in sizes]


def by_threes(frames: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of frames half a second apart; three share their tokens, the rest the last ones.

    The last of more than three has no time, because such frames may stand among others.
    """
    numbers = frame_numbers(frames, 2.0)
    return in_groups((*numbers[:-1], NO_TIME) if frames > 3 else numbers, 3)


def revealing_mixes(side: int, *, videos: bool) -> Mixes:
    """Mixes of (kind, grid) around a position table of `side` patches: inside it, beyond it, one patch."""
    half = min(max(2, side // 2), 7)  # wide towers are checked on few patches
    images: Mixes = {
        "one": [("image", (1, half, half + 1))],
        "one patch": [("image", (1, 1, 1))],
        "very wide": [("image", (1, 1, 2 * side + 1))],
        "very tall": [("image", (1, 2 * side + 1, 1))],
        "whole table": [("image", (1, side, side))],
        "beyond the table": [("image", (1, side + 2, 4))],
        "unsorted": [("image", (1, half, 3)), ("image", (1, 2, 2)), ("image", (1, 3, half))],
        # Two of each length: graphs are traced with it, and no size may be 1 there.
        "album": [
            ("image", (1, half, half + 1)),
            ("image", (1, 2, 3)),
            ("image", (1, 2, side)),
            ("image", (1, half + 1, half)),
            ("image", (1, 3, 2)),
            ("image", (1, side, 2)),
        ],
        "mix": [
            ("image", (1, half, half + 1)),
            ("image", (1, 2, 3)),
            ("image", (1, half, half)),
            ("image", (1, 3, 2)),
            ("image", (1, side, 2)),
        ],
    }
    return {**images, **_video_mixes(half)} if videos else images


def _video_mixes(half: int) -> Mixes:
    return {
        "video": [("video", (3, half, 2))],
        "longer video": [("video", (5, 2, half))],
        "videos between images": [
            ("image", (1, 2, half)),
            ("video", (2, 3, half)),
            ("image", (1, half, 3)),
            ("video", (3, 2, 2)),
            ("image", (1, half, half + 1)),
        ],
    }
