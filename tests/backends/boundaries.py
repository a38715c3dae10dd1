"""Calls that stand exactly on the borders of a profile, for every symbol of both families."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.backends import boundaries_rows
from tests.backends.boundaries_rows import SMALL, Call, Calls, Grids, Reach
from tests.backends.towers import BuiltTower, build_tower, sharp_checkpoint
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.backends import Engine
from vlexport.parity.samples import random_items
from vlexport.specs import MediaBounds, MediaItem, ShapeProfile, Symbol, bind

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
    "padded": boundaries_rows.SYMBOLS,
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

    @property
    def config(self) -> Any:
        return self.tower.recipe.read_config(self.tower.checkpoint)

    def inputs(self, items: list[MediaItem]) -> dict[str, Tensor]:
        return self.tower.recipe.prepare(self.config, items, self.tower.form)

    def border(self, profile: ShapeProfile, symbol: str, point: str) -> int:
        """The symbol's value on a border, or as near to it as calls come."""
        value: int = getattr(profile.ranges[Symbol(symbol)], point)
        reach = self.reaches.get((symbol, point))
        if reach is None:
            return value
        return (max if point == "min" else min)(value, reach.value(profile))

    def values(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """Every symbol's value in a call."""
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
    return {"packed": packed_family, "sliced": sliced_family}[name](backend, folder)


def packed_family(backend: str, folder: Path) -> Family:
    checkpoint = sharp_checkpoint(folder / "checkpoint", depth=2)
    limit_frames(checkpoint / "preprocessor_config.json", 2**15)
    tower = build_tower(checkpoint, backend, folder / "engine")
    return with_profiles(tower, {"grouped": packed_runs, "padded": packed_rows}[tower.form](tower))


def sliced_family(backend: str, folder: Path) -> Family:
    tiny = Tiny(version="4.5", with_decoder=False)
    tower = build_tower(write_tiny_minicpmv(folder / "checkpoint", tiny), backend, folder / "engine")
    return with_profiles(tower, {"grouped": sliced_runs, "padded": sliced_rows}[tower.form](tower))


def with_profiles(tower: BuiltTower, calls: Calls) -> Family:
    config = tower.recipe.read_config(tower.checkpoint)
    custom = {name: tower.recipe.packing(config).profile(name, each) for name, each in CUSTOM.items()}
    reaches = boundaries_rows.REACHES if tower.form == "padded" else {}
    profiles = {**tower.recipe.profiles(config), **custom}
    return Family(tower=tower, profiles=profiles, calls=calls, reaches=reaches)


def packed_items(tower: BuiltTower, grids: Sequence[Sequence[int]]) -> list[MediaItem]:
    """Grids in cells."""
    config = tower.recipe.read_config(tower.checkpoint)
    side = tower.recipe.merge(config)
    mix = [
        ("video" if frames > 1 else "image", (frames, rows * side, columns * side))
        for frames, rows, columns in grids
    ]
    return list(random_items(tower.recipe, config, mix, seed=0))


def packed_runs(tower: BuiltTower) -> Calls:
    packing: Any = tower.recipe.packing(tower.recipe.read_config(tower.checkpoint))
    window = packing.window_side

    def tokens(value: int, profile: ShapeProfile) -> list[MediaItem]:
        frames, rest = divmod(value, SMALL)
        if rest and frames and profile.ranges[Symbol("frame_runs")].max == 1:
            return packed_items(tower, [(1, 1, value)])
        grids: Grids = [(frames, 6, SMALL // 6)] if frames else []
        return packed_items(tower, grids + ([(1, 1, rest)] if rest else []))

    def window_runs(value: int, profile: ShapeProfile) -> list[MediaItem]:
        return enough(frames_of_windows(value, window, profile.ranges[Symbol("frame_runs")].max), profile)

    def frame_runs(value: int, profile: ShapeProfile) -> list[MediaItem]:
        return enough([(1, length) for length in range(1, value + 1)], profile)

    def enough(shapes: Sequence[tuple[int, int]], profile: ShapeProfile) -> list[MediaItem]:
        """The same frames as often as the profile's least number of tokens wants: no run more or less."""
        cells = sum(rows * columns for rows, columns in shapes)
        times = -(-profile.ranges[Symbol("tokens")].min // cells)
        return packed_items(tower, [(times, *shape) for shape in shapes])

    return {"tokens": tokens, "window_runs": window_runs, "frame_runs": frame_runs}


def packed_rows(tower: BuiltTower) -> Calls:
    return boundaries_rows.packed_calls(lambda grids: packed_items(tower, grids))


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
    config = tower.recipe.read_config(tower.checkpoint)
    items = random_items(tower.recipe, config, [("image", grid) for grid in grids], seed=0)
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


def sliced_rows(tower: BuiltTower) -> Calls:
    common = {"patches": sliced_patches(tower), "groups": sliced_groups(tower)}
    return {**common, **boundaries_rows.sliced_calls(lambda grids: sliced_items(tower, grids))}
