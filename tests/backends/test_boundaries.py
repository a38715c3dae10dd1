"""Every border of every profile: right on it, refused one step beyond, with what would fit.

In the padded layout no call can stand on some borders. A bucket holds segments that are longer than those of
the next one; an empty bucket counts as one segment of one. So bucket b shows something only beside a longer
segment on a, and bucket c beside two.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.towers import (
    RELATIVE_L2,
    WORST_TOKEN,
    BuiltTower,
    build_tower,
    errors,
    sharp_checkpoint,
)
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.backends import Engine, Runner, find_backend
from vlexport.errors import LimitError
from vlexport.parity.limits import FLOOR_FACTOR
from vlexport.parity.noise import in_float64
from vlexport.parity.samples import random_items
from vlexport.specs import NAMED_BOUNDS, MediaBounds, MediaItem, ShapeProfile, Symbol, bind, check_within
from vlexport.vision.attention.padded import BUCKETS, bucket_symbols
from vlexport.vision.attention.segmentation import take_cells
from vlexport.vision.preprocess import target_size

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
# Windows of tests have sides of 4 cells; those of whole frames have nine sizes.
WINDOW, WHOLE = 4, 9


def of_buckets(name: str) -> tuple[str, ...]:
    return tuple(str(symbol) for bucket in BUCKETS for symbol in bucket_symbols(name, bucket))


PADDED_SYMBOLS = {
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


def packed_calls(tower: BuiltTower) -> Calls:
    made = partial(packed_items, tower)

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


def sliced_calls(tower: BuiltTower) -> Calls:
    """Calls of slices and their buckets."""
    of = Sliced(partial(sliced_items, tower))
    return {
        "patches": sliced_patches(tower),
        "groups": sliced_groups(tower),
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
    whole, rest = divmod(patches, SLICE)
    return [SLICE] * whole + ([rest] if rest else [])


# What people would want beside the names: one picture, many, a video, no small ones.
CUSTOM = {
    "one picture": MediaBounds(min_pixels=1, max_pixels=6000, max_images=1, max_frames=0),
    "no small ones": MediaBounds(min_pixels=9000, max_pixels=20000, max_images=3, max_frames=0),
    "a video": MediaBounds(min_pixels=1, max_pixels=4000, max_images=0, max_frames=12),
}
# By form, by family.
SYMBOLS = {
    "grouped": {
        "packed": ("tokens", "window_runs", "frame_runs"),
        "sliced": ("patches", "groups", "slice_runs", "group_runs"),
    },
    "padded": PADDED_SYMBOLS,
}
FAMILIES = ("packed", "sliced")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tiny tower, its profiles, and for each symbol a call in which it has a wanted value.

    `reaches` holds the borders, by symbol and point, that calls of some profiles cannot stand on.
    """

    tower: BuiltTower
    profiles: Mapping[str, ShapeProfile]
    calls: Calls
    reaches: Mapping[tuple[str, str], Reach]

    def inputs(self, items: list[MediaItem]) -> dict[str, Tensor]:
        return self.tower.recipe.prepare(self.tower.config, items, self.tower.form)

    def border(self, profile: ShapeProfile, symbol: str, point: str) -> int:
        """The symbol's value on a border, or as near to it as calls come."""
        value: int = getattr(profile.ranges[Symbol(symbol)], point)
        reach = self.reaches.get((symbol, point))
        if reach is None:
            return value
        return (max if point == "min" else min)(value, reach.value(profile))

    def values(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        found = bind(self.tower.engine.inputs, shapes)
        return {str(symbol): value for symbol, value in found.items()}

    def engine(self, profile: ShapeProfile, runner: Any = None) -> Engine:
        """The engine held to another profile: what was traced serves all of them."""
        spec = replace(self.tower.engine.spec, profile=profile)
        library = runner or self.tower.engine._runner
        assert library is not None
        return Engine(library, spec)

    def resized(self, inputs: Mapping[str, Tensor], symbol: str, value: int) -> dict[str, Tensor]:
        """The same tensors with this symbol at `value`: entries cut off its axis, or the last one again."""
        changed = {}
        for spec in self.tower.engine.inputs:
            tensor = inputs[spec.name]
            known = spec.symbols().get(Symbol(symbol))
            if known is not None:
                axis, wanted = known[0], known[1] * value
                entries = torch.arange(wanted).clamp(max=tensor.shape[axis] - 1)
                tensor = tensor.index_select(axis, entries)
            changed[spec.name] = tensor
        return changed


def family(name: str, backend: str, folder: Path) -> Family:
    if name == "packed":
        checkpoint = sharp_checkpoint(folder / "checkpoint", depth=2)
        limit_frames(checkpoint / "preprocessor_config.json", 2**15)
    else:
        tiny = Tiny(version="4.5", with_decoder=False)
        checkpoint = write_tiny_minicpmv(folder / "checkpoint", tiny)
    tower = build_tower(checkpoint, backend, folder / "engine")
    calls = {
        "packed": {"grouped": packed_runs, "padded": packed_calls},
        "sliced": {"grouped": sliced_runs, "padded": sliced_calls},
    }[name][tower.form]
    packing = tower.recipe.packing(tower.config)
    custom = {name: packing.profile(name, bounds) for name, bounds in CUSTOM.items()}
    return Family(
        tower=tower,
        profiles={**tower.recipe.profiles(tower.config), **custom},
        calls=calls(tower),
        reaches=REACHES if tower.form == "padded" else {},
    )


def packed_items(tower: BuiltTower, grids: Sequence[Sequence[int]]) -> list[MediaItem]:
    """Grids in cells."""
    side = tower.recipe.merge(tower.config)
    mix = [
        ("video" if frames > 1 else "image", (frames, rows * side, columns * side))
        for frames, rows, columns in grids
    ]
    return list(random_items(tower.recipe, tower.config, mix, seed=0))


def packed_runs(tower: BuiltTower) -> Calls:
    packing: Any = tower.recipe.packing(tower.config)
    window = packing.window_side

    def tokens(value: int, profile: ShapeProfile) -> list[MediaItem]:
        frames, rest = divmod(value, SMALL)
        if rest and frames and profile.ranges[Symbol("frame_runs")].max == 1:
            return packed_items(tower, [(1, 1, value)])
        grids: Grids = [(frames, 6, SMALL // 6)] if frames else []
        return packed_items(tower, grids + ([(1, 1, rest)] if rest else []))

    def window_runs(value: int, profile: ShapeProfile) -> list[MediaItem]:
        if value > WHOLE:
            return [partly_there(value, profile.ranges[Symbol("tokens")].min)]
        return enough(frames_of_windows(value, window, profile.ranges[Symbol("frame_runs")].max), profile)

    def partly_there(value: int, tokens: int) -> MediaItem:
        """Frames of one row of windows: one cell of the first one is left, two of the second, and so on."""
        left = torch.arange(window**2) < torch.arange(1, value + 1)[:, None]
        frame = left.unflatten(1, (window, window)).transpose(0, 1).flatten()
        times = -(-tokens // int(frame.sum()))
        cells = frame.repeat(times).nonzero()[:, 0]
        (whole,) = packed_items(tower, [(times, window, window * value)])
        patches = take_cells(whole.patches, cells, packing.unit, times * len(frame))
        return replace(whole, patches=patches, cells=cells)

    def frame_runs(value: int, profile: ShapeProfile) -> list[MediaItem]:
        return enough([(1, length) for length in range(1, value + 1)], profile)

    def enough(shapes: Sequence[tuple[int, int]], profile: ShapeProfile) -> list[MediaItem]:
        """The same frames as often as the profile's least number of tokens wants: no run more or less."""
        cells = sum(rows * columns for rows, columns in shapes)
        times = -(-profile.ranges[Symbol("tokens")].min // cells)
        return packed_items(tower, [(times, *shape) for shape in shapes])

    return {"tokens": tokens, "window_runs": window_runs, "frame_runs": frame_runs}


def limit_frames(settings: Path, pixels: int) -> None:
    """A processor that shrinks frames keeps the largest calls of named profiles small enough for tests."""
    known = json.loads(settings.read_text(encoding="utf-8"))
    known["size"]["longest_edge"] = pixels
    settings.write_text(json.dumps(known), encoding="utf-8")


def frames_of_windows(value: int, window: int, lengths: int) -> list[tuple[int, int]]:
    """Frames, in cells, whose windows have so many sizes and which have at most so many lengths.

    Frames of 3, 9 and 30 cells show all nine sizes of windows of 4x4; those of 30 alone show four.
    """
    if value == 1:
        return [(window, window)]
    chosen: list[tuple[int, int]] = []
    seen: set[int] = set()
    for length in (3, 9, 30) if lengths >= 3 else (30,):
        for rows in range(1, length + 1):
            now = seen | sizes(rows, length // rows, window) if length % rows == 0 else seen
            if len(seen) < len(now) <= value:
                chosen.append((rows, length // rows))
                seen = now
    assert len(seen) == value, f"no frames with windows of {value} sizes"
    return chosen


def sizes(rows: int, columns: int, window: int) -> set[int]:
    """Cells of the windows of a frame."""
    down = {min(window, rows - start) for start in range(0, rows, window)}
    across = {min(window, columns - start) for start in range(0, columns, window)}
    return {one * other for one in down for other in across}


def sliced_items(tower: BuiltTower, grids: Sequence[tuple[int, int, int]]) -> list[MediaItem]:
    """Every slice a group of its own."""
    items = random_items(tower.recipe, tower.config, [("image", grid) for grid in grids], seed=0)
    return [replace(item, frame_groups=()) for item in items]


def sliced_patches(tower: BuiltTower) -> Call:
    def patches(value: int, profile: ShapeProfile) -> list[MediaItem]:
        # Slices of 64 patches or, where there may be only so many, of as many as it takes.
        length = max(64, -(-value // profile.ranges[Symbol("groups")].max))
        whole, rest = divmod(value, length)
        equal: Grids = [(whole, 1, length)] if whole else []
        return sliced_items(tower, equal + ([(1, 1, rest)] if rest else []))

    return patches


def sliced_groups(tower: BuiltTower) -> Call:
    return lambda value, _: sliced_items(tower, [(value, 1, 2)])


def sliced_runs(tower: BuiltTower) -> Calls:
    def slice_runs(value: int, _: ShapeProfile) -> list[MediaItem]:
        """Groups of two slices, one and two patches long: runs of one slice each."""
        pairs, single = divmod(value, 2)
        items = sliced_items(tower, [(2 * pairs, 1, 1)] if pairs else [])
        return [alternating(item) for item in items] + sliced_items(tower, [(1, 1, 5)] if single else [])

    def alternating(item: MediaItem) -> MediaItem:
        pairs = item.grid[0] // 2
        patches = torch.cat([item.patches, item.patches[:pairs] + 1])
        times = tuple((2 * pair, 2 * pair + 1) for pair in range(pairs))
        return replace(item, patches=patches, slices=((1, 1), (1, 2)) * pairs, frame_groups=times)

    def group_runs(value: int, _: ShapeProfile) -> list[MediaItem]:
        return sliced_items(tower, [(1, 1, length) for length in range(1, value + 1)])

    return {
        "patches": sliced_patches(tower),
        "groups": sliced_groups(tower),
        "slice_runs": slice_runs,
        "group_runs": group_runs,
    }


NAMES = ("any", *NAMED_BOUNDS, *CUSTOM)
QUICK, FULL = "onnxruntime", ("eager", "inductor", "openvino")
BACKENDS = [QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)]
# The symbols of each backend's form.
BOUND = [
    (backend, kind, symbol)
    for backend in (QUICK, *FULL)
    for kind, symbols in SYMBOLS[find_backend(backend).form].items()
    for symbol in symbols
]


@pytest.fixture(scope="module", params=BACKENDS)
def families(request, tmp_path_factory):
    return {
        name: family(name, request.param, tmp_path_factory.mktemp(f"{request.param}-{name}"))
        for name in FAMILIES
    }


@dataclass
class Recorder(Runner):
    calls: list[object] = field(default_factory=list)

    def run(self, tensors):
        self.calls.append(tensors)
        return {}


def check_inside(made: Family, name: str, symbol: str, point: str) -> None:
    profile = made.profiles[name]
    value = made.border(profile, symbol, point)
    items = made.calls[symbol](value, profile)
    inputs = made.inputs(items)
    found = made.engine(profile).run(inputs)["embeds"]
    reference = made.tower.reference(items)
    relative, worst = errors(found, reference)
    assert made.values(inputs)[symbol] == value, (name, point)
    if relative < RELATIVE_L2 and worst < WORST_TOKEN:
        return
    # The gate's own rule for calls on which the reference itself rounds more: parity.md 2, L1.
    wide = in_float64(made.tower.recipe.reference(made.tower.checkpoint), items)["embeds"]
    floor = errors(reference, wide)
    relative, worst = errors(found, wide)
    assert relative < max(RELATIVE_L2, FLOOR_FACTOR * floor[0]), (name, point, relative, floor)
    assert worst < max(WORST_TOKEN, FLOOR_FACTOR * floor[1]), (name, point, worst, floor)


# Borders whose calls have more than 20,000 patches, or more than 1,000 slices one by one in the reference,
# or long segments.
LARGE = {
    *((name, "tokens", "max") for name in ("any", "thumbnail", "video")),
    ("any", "frame_runs", "max"),
    ("any", "patches", "max"),
    ("thumbnail", "patches", "max"),
    *(("any", symbol, "max") for symbol in ("groups", "slice_runs", "group_runs")),
    *((name, "window_rows", "max") for name in ("any", "thumbnail", "video")),
    *(("any", symbol, "max") for each in SYMBOLS["padded"].values() for symbol in each),
}
BORDERS = [
    pytest.param(backend, kind, symbol, marks=[pytest.mark.full] * (backend in FULL))
    for backend, kind, symbol in BOUND
]
POINTS = ("min", "opt", "max")


@pytest.mark.seconds
def test_every_symbol_of_the_form_has_borders_here(families):
    for kind, made in families.items():
        shown = {str(symbol) for spec in made.tower.engine.inputs for symbol in spec.symbols()}
        assert shown == set(made.calls) == set(SYMBOLS[made.tower.form][kind])


@pytest.mark.seconds
@pytest.mark.parametrize(("families", "kind", "symbol"), BORDERS, indirect=["families"])
def test_on_the_border_the_answer_is_right_and_one_step_beyond_is_refused(families, kind, symbol):
    for name in NAMES:
        for point in POINTS:
            if (name, symbol, point) not in LARGE:
                check_inside(families[kind], name, symbol, point)
        for step in (-1, 1):
            refuse_beyond(families[kind], families[kind].profiles[name], symbol, step)


@pytest.mark.full
@pytest.mark.parametrize(
    ("families", "kind", "symbol"),
    [each for each in BOUND if any(each[2] == symbol for _, symbol, _ in LARGE)],
    indirect=["families"],
)
def test_on_the_borders_of_large_calls_the_answer_is_right(families, kind, symbol):
    for name, _, point in sorted(each for each in LARGE if each[1] == symbol):
        check_inside(families[kind], name, symbol, point)


def refuse_beyond(made: Family, profile: ShapeProfile, symbol: str, step: int) -> None:
    known = profile.ranges[Symbol(symbol)]
    nearest, library = (known.min if step < 0 else known.max), Recorder()
    least = made.calls[symbol](made.border(profile, symbol, "min"), profile)
    inputs = made.resized(made.inputs(least), symbol, nearest + step)
    message = (
        f"{symbol}: {nearest + step} does not fit profile '{profile.name}' ({known.min} to {known.max}); "
        f"the nearest legal size is {nearest}. Send less at once or build with a larger profile."
    )
    with pytest.raises(LimitError, match=f"^{re.escape(message)}$"):
        made.engine(profile, library).run(inputs)
    assert library.calls == []


# Aspects that gain most by rounding to whole cells, and least; the last is the longest that is taken.
ASPECTS = (1.0, 2.0, 1 / 3, 17.0, 200.0)


@pytest.mark.seconds
def test_as_many_images_of_as_many_pixels_as_were_requested_fit(families):
    made = families["packed"]
    for name in (*NAMED_BOUNDS, *CUSTOM):
        for aspect in ASPECTS:
            check_within(made.profiles[name], largest_call(made, name, aspect))


def largest_call(made: Family, name: str, aspect: float) -> dict[Symbol, int]:
    bounds, rule, most = {**NAMED_BOUNDS, **CUSTOM}[name], made.tower.config.rule, []
    for count, resize, kind in (
        (bounds.max_images, rule.image, "image"),
        (bounds.max_frames, rule.video, "video"),
    ):
        width = max(1, int((bounds.max_pixels * aspect) ** 0.5))
        height = max(1, min(bounds.max_pixels // width, width * 200))
        sides = target_size(height, min(width, 200 * height), 8, resize.min_pixels, resize.max_pixels)
        grid = (1 if kind == "image" else -(-count // rule.temporal), *(side // rule.patch for side in sides))
        items = [made.tower.recipe.item(made.tower.config, kind, grid, no_pixels(made, grid))]
        most += items * (count if kind == "image" else min(count, 1))
    return bound_values(made, most)


def test_a_small_image_of_as_few_pixels_as_were_requested_fits(families):
    made, bounds = families["packed"], CUSTOM["no small ones"]
    for aspect in ASPECTS:
        width = int((bounds.min_pixels * aspect) ** 0.5) + 1
        height = -(-bounds.min_pixels // width)
        sides = target_size(height, width, 8, 64, 2**15)
        grid = (1, *(side // made.tower.config.rule.patch for side in sides))
        item = made.tower.recipe.item(made.tower.config, "image", grid, no_pixels(made, grid))
        check_within(made.profiles["no small ones"], bound_values(made, [item]))


def no_pixels(made: Family, grid: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(1, 1).expand(math.prod(grid), made.tower.recipe.row_width(made.tower.config))


def bound_values(made: Family, items) -> dict[Symbol, int]:
    return {Symbol(name): value for name, value in made.values(made.inputs(items)).items()}
