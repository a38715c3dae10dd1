"""Calls on the borders of the padded layout, and the borders that no call can stand on.

A bucket holds segments that are longer than those of the next one; an empty bucket counts as one segment of
one. So bucket b shows something only beside a longer segment on a, and bucket c beside two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from vlexport.specs import MediaItem, ShapeProfile, Symbol
from vlexport.vision.attention.padded import BUCKETS, bucket_symbols

Call = Callable[[int, ShapeProfile], list[MediaItem]]
Calls = Mapping[str, Call]
Grids = list[tuple[int, int, int]]
# How many segments, and their length.
Stretches = Sequence[tuple[int, int]]
# Cells of a frame that large calls are made of: attention inside a frame costs its square.
SMALL = 48
# The longest frame in cells, and slice in patches, of a test: 1024 cells are 4096 patches.
LONGEST_FRAME, LONGEST_SLICE = 1024, 4096
# Sliced towers of tests have slices of up to 72 patches, in calls of named bounds.
SLICE = 72
# Windows of tests have sides of 4 cells.
WINDOW = 4


def of_buckets(name: str) -> tuple[str, ...]:
    return tuple(str(symbol) for bucket in BUCKETS for symbol in bucket_symbols(name, bucket))


SYMBOLS = {
    "packed": ("tokens", "window_rows", *of_buckets("frame")),
    "sliced": ("patches", "groups", *of_buckets("slice"), *of_buckets("group")),
}


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How near calls of a profile come to a border, and why they come no nearer in some profiles."""

    reason: str
    value: Callable[[ShapeProfile], int]


def most(profile: ShapeProfile, symbol: str) -> int:
    return profile.ranges[Symbol(symbol)].max


def least(profile: ShapeProfile, symbol: str) -> int:
    return profile.ranges[Symbol(symbol)].min


def least_rows(profile: ShapeProfile) -> int:
    return -(-least(profile, "tokens") // WINDOW**2)


def most_rows(profile: ShapeProfile) -> int:
    """Rows of strips three cells high; buckets of the shortest ones, where longer ones are too many."""
    tokens, frames = most(profile, "tokens"), most(profile, "frames_a")
    if frames * (9 + 21 + 33) > tokens:
        return frames + 2 * ((tokens - 9 * frames) // 21)
    return (tokens + 3 * 3 * frames) // 12


def least_longest(profile: ShapeProfile) -> int:
    tokens, frames = least(profile, "tokens"), most(profile, "frames_a")
    return min(-(-tokens // frames), max(3, -(-tokens // (3 * frames)) + 1))


def beside(
    total: str, length: str, buckets: int, longest: int | None = None
) -> Callable[[ShapeProfile], int]:
    """The longest segment beside segments that are longer by one each, on so many buckets in all."""
    longer = buckets * (buckets - 1) // 2

    def value(profile: ShapeProfile) -> int:
        shared = (most(profile, total) - longer) // buckets
        return min(most(profile, f"{length}_a") - (buckets - 1), shared, longest or shared)

    return value


def groups_beside(buckets: int) -> Callable[[ShapeProfile], int]:
    return lambda profile: max(1, most(profile, "groups") - (buckets - 1))


def group_patches_beside(buckets: int) -> Callable[[ShapeProfile], int]:
    """Groups are cut into short slices, so none is too long for a test."""
    found = beside("patches", "group_cells", buckets)
    return lambda profile: found(profile) if most(profile, "groups") >= buckets else 1


LONGER = "segments of b are shorter than one of a, those of c than one of b, and a call holds all three"
COST = "calls reach it, tests do not: attention inside one segment costs the square of its patches"
COUNTED = "every group of bucket b or c stands beside longer ones, and the call counts them all"
REACHES: Mapping[tuple[str, str], Reach] = {
    ("window_rows", "min"): Reach(
        reason="a row holds 16 cells, so the least tokens fill more than one",
        value=least_rows,
    ),
    ("window_rows", "max"): Reach(
        reason="the bound counts rows of 8 cells. Windows have 1 to 4, 6, 8, 9, 12 or 16. A row of windows "
        "of 8 or less takes 12 cells before best fit opens another, so only one with a window of 9 has more "
        "than 4 free. A frame has one such window at most, and there are three buckets of frames",
        value=most_rows,
    ),
    ("frame_cells_a", "min"): Reach(
        reason="the least tokens must fit all frames of three buckets", value=least_longest
    ),
    ("frame_cells_a", "max"): Reach(reason=COST, value=lambda _: LONGEST_FRAME),
    ("frame_cells_b", "max"): Reach(reason=LONGER, value=beside("tokens", "frame_cells", 2, LONGEST_FRAME)),
    ("frame_cells_c", "max"): Reach(reason=LONGER, value=beside("tokens", "frame_cells", 3, LONGEST_FRAME)),
    ("slice_cells_a", "max"): Reach(reason=COST, value=lambda _: LONGEST_SLICE),
    ("slice_cells_b", "max"): Reach(reason=LONGER, value=beside("patches", "slice_cells", 2, LONGEST_SLICE)),
    ("slice_cells_c", "max"): Reach(reason=LONGER, value=beside("patches", "slice_cells", 3, LONGEST_SLICE)),
    ("groups_b", "max"): Reach(reason=COUNTED, value=groups_beside(2)),
    ("groups_c", "max"): Reach(reason=COUNTED, value=groups_beside(3)),
    ("group_cells_b", "max"): Reach(reason=LONGER, value=group_patches_beside(2)),
    ("group_cells_c", "max"): Reach(reason=LONGER, value=group_patches_beside(3)),
}


def packed_calls(made: Callable[[Grids], list[MediaItem]]) -> Calls:
    """Calls of frames; `made` takes grids in cells."""

    def of(shape: Callable[[int, ShapeProfile], Stretches]) -> Call:
        def call(value: int, profile: ShapeProfile) -> list[MediaItem]:
            return made([(count, *sides(cells)) for count, cells in shape(value, profile) if count and cells])

        return call

    def fill(profile: ShapeProfile, shortest: int) -> int:
        return max(shortest, least(profile, "tokens"))

    return {
        "tokens": of(frames_of_tokens),
        "window_rows": lambda value, profile: made(grids_of_rows(value, profile)),
        "frames_a": of(lambda value, profile: [(value, max(2, -(-least(profile, "tokens") // value)))]),
        "frames_b": of(lambda value, profile: [(1, fill(profile, 3)), (value, 2)]),
        "frames_c": of(lambda value, profile: [(1, fill(profile, 3)), (1, 2), (value, 1)]),
        "frame_cells_a": of(frames_of_cells),
        "frame_cells_b": of(lambda value, profile: [(1, fill(profile, value + 1)), (1, value)]),
        "frame_cells_c": of(
            lambda value, profile: [(1, fill(profile, value + 2)), (1, value + 1), (1, value)]
        ),
    }


def sides(cells: int) -> tuple[int, int]:
    """Rows and columns of a frame, as square as its number of cells lets it be."""
    rows = next(side for side in range(isqrt(cells), 0, -1) if cells % side == 0)
    return rows, cells // rows


def frames_of_tokens(value: int, profile: ShapeProfile) -> Stretches:
    length = max(SMALL, -(-value // most(profile, "frames_a")))
    whole, rest = divmod(value, length)
    return [(whole, length), (1, rest)]


def frames_of_cells(value: int, profile: ShapeProfile) -> Stretches:
    tokens, frames = least(profile, "tokens"), most(profile, "frames_a")
    if value * frames >= tokens:
        return [(-(-tokens // value), value)]
    return [(frames, value), (frames, value - 1), (frames, value - 2)]


def grids_of_rows(value: int, profile: ShapeProfile) -> Grids:
    """One frame of whole windows or, where these are too many cells, strips whose windows share no row."""
    if value * WINDOW**2 <= most(profile, "tokens"):
        return [(1, WINDOW, WINDOW * value)]
    frames = most(profile, "frames_a")
    usual = value // frames
    if usual < 6:
        strips = [(frames, 1), ((value - frames) // 2, 2)]
    else:
        # Far apart, so that the two lengths of the longest frames share a bucket.
        short, middle = max(1, usual // 8), max(2, usual // 4)
        long, more = divmod(value - frames * (short + middle), frames)
        strips = [(frames, short), (frames, middle), (frames - more, long), (more, long + 1)]
    return [(count, WINDOW - 1, WINDOW * windows - 1) for count, windows in strips if count]


@dataclass(frozen=True)
class Sliced:
    """Calls of slices; `made` takes grids in patches."""

    made: Callable[[Grids], list[MediaItem]]

    def grouped(self, lengths_of: Sequence[Sequence[int]]) -> list[MediaItem]:
        """Groups of slices that share their tokens; given are the lengths of their slices."""
        lengths = [length for group in lengths_of for length in group]
        item = self.made([(1, 1, sum(lengths))])[0]
        numbers = iter(range(len(lengths)))
        times = tuple(tuple(next(numbers) for _ in group) for group in lengths_of)
        return [replace(item, slices=tuple((1, length) for length in lengths), frame_groups=times)]

    def slices(self, longer: Sequence[int], length: int) -> Call:
        return lambda value, _: self.grouped(eights([*longer, *[length] * value]))

    def slice_patches(self, *steps: int) -> Call:
        def call(value: int, profile: ShapeProfile) -> list[MediaItem]:
            lengths = [value + step for step in steps]
            single = most(profile, "groups") >= len(lengths)
            return self.grouped([[length] for length in lengths] if single else [lengths])

        return call

    def groups(self, *longer: int) -> Call:
        def call(value: int, profile: ShapeProfile) -> list[MediaItem]:
            if most(profile, "groups") < value + len(longer):
                return self.grouped([[1]])
            return self.grouped([*([length] for length in longer), *[[1]] * value])

        return call

    def group_patches(self, *steps: int) -> Call:
        def call(value: int, profile: ShapeProfile) -> list[MediaItem]:
            known = steps if most(profile, "groups") >= len(steps) else steps[-1:]
            return self.grouped([parts(value + step) for step in known])

        return call


def sliced_calls(made: Callable[[Grids], list[MediaItem]]) -> Calls:
    """Calls of the buckets' symbols; `made` takes grids in patches."""
    of = Sliced(made)
    return {
        "slices_a": of.slices((), 2),
        "slices_b": of.slices((2,), 1),
        "slices_c": of.slices((3, 2), 1),
        "slice_cells_a": of.slice_patches(0),
        "slice_cells_b": of.slice_patches(1, 0),
        "slice_cells_c": of.slice_patches(2, 1, 0),
        "groups_a": of.groups(),
        "groups_b": of.groups(2),
        "groups_c": of.groups(3, 2),
        "group_cells_a": of.group_patches(0),
        "group_cells_b": of.group_patches(1, 0),
        "group_cells_c": of.group_patches(2, 1, 0),
    }


def eights(lengths: Sequence[int]) -> list[Sequence[int]]:
    """Eight slices a group: fewer groups than slices."""
    return [lengths[start : start + 8] for start in range(0, len(lengths), 8)]


def parts(patches: int) -> list[int]:
    """Slices of a group of so many patches."""
    whole, rest = divmod(patches, SLICE)
    return [SLICE] * whole + ([rest] if rest else [])
