"""Calls that stand exactly on the borders of a profile, for every symbol of both families."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.backends.towers import BuiltTower, build_tower, sharp_checkpoint
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.backends import Engine
from vlexport.parity.samples import random_items
from vlexport.specs import MediaBounds, MediaItem, ShapeProfile, Symbol, bind

Grids = list[tuple[int, int, int]]
# Cells of a frame that large calls are made of: attention inside a frame costs its square.
SMALL = 48
# What people would ask for beside the names: one picture, many, a video, no small ones.
CUSTOM = {
    "one picture": MediaBounds(min_pixels=1, max_pixels=6000, max_images=1, max_frames=0),
    "no small ones": MediaBounds(min_pixels=9000, max_pixels=20000, max_images=3, max_frames=0),
    "a video": MediaBounds(min_pixels=1, max_pixels=4000, max_images=0, max_frames=12),
}
FAMILIES = ("packed", "sliced")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tiny tower, its profiles, and for each symbol a call in which it has a wanted value."""

    tower: BuiltTower
    profiles: Mapping[str, ShapeProfile]
    calls: Mapping[str, Callable[[int, ShapeProfile], list[MediaItem]]]

    @property
    def config(self) -> Any:
        return self.tower.recipe.read_config(self.tower.checkpoint)

    def inputs(self, items: list[MediaItem]) -> dict[str, Tensor]:
        return self.tower.recipe.prepare(self.config, items, "runs")

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
        """The same tensors with this symbol at `value`: rows cut off, or the last row again."""
        changed = {}
        for spec in self.tower.engine.inputs:
            tensor = inputs[spec.name]
            known = spec.symbols().get(Symbol(symbol))
            if known is not None:
                rows = known[1] * value
                again = tensor[-1:].expand(max(0, rows - len(tensor)), *tensor.shape[1:])
                tensor = torch.cat([tensor[:rows], again])
            changed[spec.name] = tensor
        return changed


def family(name: str, backend: str, folder: Path) -> Family:
    return {"packed": packed_family, "sliced": sliced_family}[name](backend, folder)


def packed_family(backend: str, folder: Path) -> Family:
    checkpoint = sharp_checkpoint(folder / "checkpoint")
    limit_frames(checkpoint / "preprocessor_config.json", 2**15)
    tower = build_tower(checkpoint, backend, folder / "engine")
    config = tower.recipe.read_config(tower.checkpoint)
    side, window = config.merge, config.window_side

    def tokens(value: int, profile: ShapeProfile) -> list[MediaItem]:
        frames, rest = divmod(value, SMALL)
        if rest and frames and profile.ranges[Symbol("frame_runs")].max == 1:
            return made([(1, side, side * value)])
        grids: Grids = [(frames, 6 * side, SMALL // 6 * side)] if frames else []
        return made(grids + ([(1, side, side * rest)] if rest else []))

    def window_runs(value: int, profile: ShapeProfile) -> list[MediaItem]:
        shapes = frames_of_windows(value, window, profile.ranges[Symbol("frame_runs")].max)
        return enough([(1, rows * side, columns * side) for rows, columns in shapes], profile)

    def frame_runs(value: int, profile: ShapeProfile) -> list[MediaItem]:
        return enough([(1, side, side * length) for length in range(1, value + 1)], profile)

    def enough(grids: Grids, profile: ShapeProfile) -> list[MediaItem]:
        """The same frames as often as the profile's least number of tokens wants: no run more or less."""
        cells = sum(rows * columns for _, rows, columns in grids) // side**2
        times = -(-profile.ranges[Symbol("tokens")].min // cells)
        return made([(times, *shape) for _, *shape in grids])

    def made(grids: Sequence[Sequence[int]]) -> list[MediaItem]:
        mix = [("video" if frames > 1 else "image", (frames, *shape)) for frames, *shape in grids]
        return list(random_items(tower.recipe, config, mix, seed=0))  # type: ignore[arg-type]

    custom = {name: tower.recipe.profile_from(config, name, each) for name, each in CUSTOM.items()}
    return Family(
        tower=tower,
        profiles={**tower.recipe.profiles(config), **custom},
        calls={"tokens": tokens, "window_runs": window_runs, "frame_runs": frame_runs},
    )


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


def sliced_family(backend: str, folder: Path) -> Family:
    tiny = Tiny(version="4.5", with_decoder=False)
    tower = build_tower(write_tiny_minicpmv(folder / "checkpoint", tiny), backend, folder / "engine")
    config = tower.recipe.read_config(tower.checkpoint)

    def patches(value: int, profile: ShapeProfile) -> list[MediaItem]:
        # Slices of 64 patches or, where there may be only so many, of as many as it takes.
        length = max(64, -(-value // profile.ranges[Symbol("groups")].max))
        whole, rest = divmod(value, length)
        equal: Grids = [(whole, 1, length)] if whole else []
        return made(equal + ([(1, 1, rest)] if rest else []))

    def groups(value: int, profile: ShapeProfile) -> list[MediaItem]:
        return made([(value, 1, 2)])

    def slice_runs(value: int, profile: ShapeProfile) -> list[MediaItem]:
        """Groups of two slices, one and two patches long: runs of one slice each."""
        pairs, single = divmod(value, 2)
        items = made([(2 * pairs, 1, 1)] if pairs else [])
        return [alternating(item) for item in items] + made([(1, 1, 5)] if single else [])

    def alternating(item: MediaItem) -> MediaItem:
        pairs = item.grid[0] // 2
        patches = torch.cat([item.patches, item.patches[:pairs] + 1])
        times = tuple((2 * pair, 2 * pair + 1) for pair in range(pairs))
        return replace(item, patches=patches, slices=((1, 1), (1, 2)) * pairs, frame_groups=times)

    def group_runs(value: int, profile: ShapeProfile) -> list[MediaItem]:
        return made([(1, 1, length) for length in range(1, value + 1)])

    def made(grids: Grids) -> list[MediaItem]:
        items = random_items(tower.recipe, config, [("image", grid) for grid in grids], seed=0)
        return [replace(item, frame_groups=()) for item in items]

    custom = {name: tower.recipe.profile_from(config, name, each) for name, each in CUSTOM.items()}
    return Family(
        tower=tower,
        profiles={**tower.recipe.profiles(config), **custom},
        calls={"patches": patches, "groups": groups, "slice_runs": slice_runs, "group_runs": group_runs},
    )
