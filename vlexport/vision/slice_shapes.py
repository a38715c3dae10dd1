"""Which sizes of a sliced call vary, how far, what attention costs, and shapes that show faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from vlexport.specs import Dim, MediaBounds, MediaItem, Range, ShapeProfile, Symbol
from vlexport.vision.segments import attention_work
from vlexport.vision.slice_tables import NO_TIME, frame_numbers, groups_of, in_groups, pack
from vlexport.vision.slices import SliceRule

PATCHES = Symbol("patches")
GROUPS = Symbol("groups")
SLICE_RUNS = Symbol("slice_runs")
GROUP_RUNS = Symbol("group_runs")
Mixes = dict[str, list[tuple[str, tuple[int, int, int]]]]
# Sides are rounded to whole patches, so a slice may come out above its area; more only for long strips.
ROUNDING = 9 / 8


def table_axes(queries: int) -> Mapping[str, Mapping[int, Dim]]:
    """Which axes of patches, tables and `embeds` vary, and how they hang together."""
    integers = ("order", "position_ids", "cells", "frames")
    weights = ("row_weights", "column_weights", "key_row_weights", "key_column_weights")
    return {
        **{name: {0: PATCHES} for name in ("patches", *integers, *weights)},
        "runs": {0: SLICE_RUNS},
        "group_runs": {0: GROUP_RUNS},
        "group_inverse": {0: GROUPS},
        "embeds": {0: queries * GROUPS},
    }


def any_mix() -> ShapeProfile:
    """Whatever fits a call of 262,144 patches; groups of one run are equal in length, so 723 fill it."""
    ranges = {
        PATCHES: Range(1, 8192, 262144),
        GROUPS: Range(1, 8, 4096),
        SLICE_RUNS: Range(1, 2, 4096),
        GROUP_RUNS: Range(1, 2, 723),
    }
    return ShapeProfile("any", ranges)


def bounded(name: str, bounds: MediaBounds, rule: SliceRule) -> ShapeProfile:
    """The profile of calls within these bounds; a slice has about the same area whatever it shows."""
    wanted = math.ceil(bounds.max_pixels / rule.side**2)
    cells = min(wanted + 1, rule.max_cells) if min(wanted, rule.max_cells) > 1 else 0
    slices = bounds.max_images * (1 + cells) + bounds.max_frames
    most = math.ceil((rule.side / rule.patch) ** 2 * ROUNDING)
    # The overview and the cells of an image differ in size; the frames of a video do not.
    runs = max(1, bounds.max_images * (2 if cells else 1) + bounds.max_frames)
    ranges = {
        PATCHES: Range(1, most * min(slices, 1 + cells), most * slices),
        GROUPS: Range(1, min(slices, 1 + cells), slices),
        SLICE_RUNS: Range(1, min(runs, 2), runs),
        GROUP_RUNS: Range(1, min(runs, 2), runs),
    }
    return ShapeProfile(name, ranges)


def score_counts(media: Sequence[MediaItem], queries: int) -> dict[str, tuple[int, int]]:
    """Score entries per head, (computed, needed), of one block and of the resampler; nothing is padded."""
    groups = groups_of(media)
    packed = pack(groups)
    lengths = [each.length for group in groups for each in group]
    keys = int(packed.group_keys_R2.prod(dim=-1).sum())
    return {
        "slice": (attention_work(packed.runs_R2), sum(length**2 for length in lengths)),
        "resampler": (keys * queries, sum(lengths) * queries),
    }


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
        "mix": [
            ("image", (1, half, half + 1)),
            ("image", (1, 2, 3)),
            ("image", (1, half, half)),
            ("image", (1, 3, 2)),
            ("image", (1, side, 2)),
        ],
    }
    if not videos:
        return images
    return {
        **images,
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
