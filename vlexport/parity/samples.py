"""Inputs to compare on: seeded pixels over shapes that can see wrong orders, and the corners of a profile."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vlexport._build.export import cast_floats, example_inputs, specs_of
from vlexport._build.spec import BuildSpec
from vlexport.backends import Progress
from vlexport.errors import InputError, LimitError
from vlexport.parity.report import Row
from vlexport.recipe import Grid, Recipe
from vlexport.specs import MediaItem, Range, ShapeProfile, Symbol, TensorSpec, bind, check_within
from vlexport.vision.attention.packing import Packing
from vlexport.vision.attention.segmentation import take_cells
from vlexport.vision.preprocess import PixelNormalisation

# Pixels this much fainter bring the first norm's statistics near its epsilon.
FAINT = 1e-2
# The share of cells that are left of a sample of some cells, and how it is called.
SHARE, PART = 0.4, "some cells"
# Patches along one side: odd places beyond 256 do not exist in bfloat16, and operators cut at powers of two.
FAR = 1002
# Patches along both sides of the frame with the longest attention segment that every build compares.
LONG = 64
# Patches of the largest sample of a check, which towers of many weights take seconds for.
MAX_PATCHES, MAX_PATCHES_HEAVY = 4096, 640


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One call: a name for people, and its items."""

    name: str
    items: tuple[MediaItem, ...]

    @property
    def num_patches(self) -> int:
        return sum(len(item.patches) for item in self.items)

    @property
    def num_bytes(self) -> int:
        return sum(item.patches.nbytes for item in self.items)

    @property
    def is_whole(self) -> bool:
        return all(item.cells is None for item in self.items)

    def digest(self) -> str:
        hashed = hashlib.sha256()
        for item in self.items:
            cells = () if item.cells is None else (item.cells.tolist(),)
            cut = (item.grid, item.slices, item.frame_groups, *cells)
            hashed.update(f"{item.kind} {cut} {item.patches.dtype} {tuple(item.patches.shape)}\n".encode())
            hashed.update(item.patches.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()


def mixed(samples: Sequence[Sample]) -> Sample:
    """Return the call of most items, of several the smallest whole one."""
    return max(samples, key=lambda sample: (len(sample.items), sample.is_whole, -sample.num_bytes))


def tracked(samples: Sequence[Sample], progress: Progress, phase: str) -> Iterator[Sample]:
    """Yield the samples, and report the share of them that is done."""
    for number, sample in enumerate(samples):
        progress(phase, number / len(samples))
        yield sample


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRules:
    """The profile that the engine was built for, and how many patches a comparison may take."""

    profile: ShapeProfile
    inputs: tuple[TensorSpec, ...]
    tokens: Symbol | None
    form: str
    max_patches: int


def samples(recipe: Recipe[Any], config: Any, rules: SampleRules) -> Iterator[Sample | Row]:
    """Yield the recipe's mixes and the corners of the profile, smallest first; rows where they do not fit."""
    mixes = _mixes(recipe, config, rules)
    sizes = {name: sum(math.prod(grid) for _, grid in mix) for name, mix in mixes.items()}
    packing = recipe.packing(config)
    fitting = [name for name in mixes if _misfit(recipe, config, mixes[name], rules) is None]

    def is_cut(name: str) -> bool:
        # Parts of frames may have more runs than the frames, and a profile of few images not so many.
        items = (blank(recipe, config, kind, grid) for kind, grid in mixes[name])
        parts = [part_of(item, packing, seed) for seed, item in enumerate(items)]
        return _outside(recipe, config, parts, rules) is None

    largest_first = sorted(fitting, key=lambda name: (len(mixes[name]), name), reverse=True)
    some = next(filter(is_cut, largest_first), None) if packing.takes_cells else None
    faint = min(sizes, key=lambda name: (abs(sizes[name] - 64), name), default=None)
    for number, name in enumerate(sorted(mixes, key=lambda name: (sizes[name], name))):
        reason = _misfit(recipe, config, mixes[name], rules)
        if reason is not None:
            yield Row(level="L1", check="shapes", shapes=name, note=reason, given="not_run")
            continue
        items = random_items(recipe, config, mixes[name], seed=number)
        yield Sample(name=name, items=items)
        if name == faint:
            levels = packing.levels
            fainter = tuple(scaled(item, FAINT, levels) for item in items)
            yield Sample(name=f"{name}, faint", items=fainter)
        if name == some:
            parts = tuple(part_of(item, packing, seed) for seed, item in enumerate(items))
            yield Sample(name=f"{name}, {PART}", items=parts)


def part_of(item: MediaItem, packing: Packing, seed: int) -> MediaItem:
    """Return some cells of an item, of a video none of its first frame, and at least one."""
    per_frame = math.prod(item.grid[1:]) // packing.unit
    drawn = torch.rand(item.grid[0] * per_frame, generator=torch.Generator().manual_seed(seed))
    drawn[: per_frame if item.grid[0] > 1 else 0] = 1.0
    cells = (drawn <= max(SHARE, float(drawn.min()))).nonzero()[:, 0]
    patches = take_cells(item.patches, cells, packing.unit, len(drawn))
    return replace(item, patches=patches, cells=cells)


def prepared(subject: BuildSpec, items: Sequence[MediaItem]) -> dict[str, Tensor]:
    """Return the engine's inputs for these items."""
    return cast_floats(subject.recipe.prepare(subject.config, items, subject.form), subject.dtype)


def largest_sample(recipe: Recipe[Any], config: Any, rules: SampleRules) -> int:
    """Return patches of the largest of the samples, of which none is made."""
    mixes = _mixes(recipe, config, rules).values()
    fitting = [mix for mix in mixes if _misfit(recipe, config, mix, rules) is None]
    return max((sum(math.prod(grid) for _, grid in mix) for mix in fitting), default=0)


def _mixes(recipe: Recipe[Any], config: Any, rules: SampleRules) -> dict[str, Sequence[tuple[str, Grid]]]:
    return {**recipe.shape_sets(config), **corners(recipe, config, rules)}


def scaled(item: MediaItem, factor: float, levels: PixelNormalisation | None) -> MediaItem:
    """Return the same item with pixels of another size; bytes with those that are nearest."""
    if levels is None:
        return replace(item, patches=item.patches * factor)
    return replace(item, patches=levels.bytes_of(levels.pixels(item.patches) * factor))


def random_items(
    recipe: Recipe[Any], config: Any, mix: Sequence[tuple[str, Grid]], *, seed: int
) -> tuple[MediaItem, ...]:
    """Return items of noise over a slope, no two rows equal; bytes are the nearest ones, from 0 to 255."""
    generator = torch.Generator().manual_seed(seed)
    packing = recipe.packing(config)

    def rows(count: int) -> Tensor:
        pixels = _rows(count, packing.row_width, generator)
        return pixels if packing.levels is None else packing.levels.bytes_of(pixels)

    return tuple(
        replace(
            recipe.item(config, kind, grid, rows(math.prod(grid))),
            seconds_per_grid=1.0 if kind == "video" else None,
        )
        for kind, grid in mix
    )


def _rows(rows: int, width: int, generator: torch.Generator) -> Tensor:
    slope = torch.linspace(-0.5, 0.5, rows)[:, None] * torch.linspace(1.0, -1.0, width)
    return slope + torch.randn(rows, width, generator=generator)


def _misfit(
    recipe: Recipe[Any], config: Any, mix: Sequence[tuple[str, Grid]], rules: SampleRules
) -> str | None:
    count = sum(math.prod(grid) for _, grid in mix)
    if count > rules.max_patches:
        return f"{count} patches, more than the {rules.max_patches} that a check takes"
    return _outside(recipe, config, [blank(recipe, config, kind, grid) for kind, grid in mix], rules)


def _outside(recipe: Recipe[Any], config: Any, items: Sequence[MediaItem], rules: SampleRules) -> str | None:
    try:
        check_within(rules.profile, symbol_values(recipe, config, items, rules))
    except LimitError as error:
        return f"outside the profile: {str(error).split(';', maxsplit=1)[0]}"
    except InputError as error:
        return f"no legal shape: {error}"
    return None


def require_fit(subject: BuildSpec, item: MediaItem) -> MediaItem:
    """Return an item that the engine of a build will take; refuse any other, before there is an engine."""
    recipe, config, form = subject.recipe, subject.config, subject.form
    specs = specs_of(example_inputs(recipe, config, subject.dtype, form), recipe.axes(config, form))
    shapes = {name: tuple(tensor.shape) for name, tensor in recipe.prepare(config, [item], form).items()}
    check_within(subject.profile, bind(specs, shapes))
    return item


def symbol_values(
    recipe: Recipe[Any], config: Any, items: Sequence[MediaItem], rules: SampleRules
) -> dict[Symbol, int]:
    """Return the value of every symbol of the engine's inputs for these items."""
    inputs: Mapping[str, Tensor] = recipe.prepare(config, items, rules.form)
    return bind(rules.inputs, {name: tuple(tensor.shape) for name, tensor in inputs.items()})


def blank(recipe: Recipe[Any], config: Any, kind: str, grid: Grid) -> MediaItem:
    """Return an item without memory, one zero seen as all patches: those at a profile's corner are large."""
    kept: torch.dtype = getattr(torch, recipe.input_dtype(config))
    rows = torch.zeros(1, 1, dtype=kept).expand(math.prod(grid), recipe.row_width(config))
    return recipe.item(config, kind, grid, rows)


def corners(recipe: Recipe[Any], config: Any, rules: SampleRules) -> dict[str, list[tuple[str, Grid]]]:
    """Return one image of the fewest and one of the most patches that the profile allows."""
    symbol = patch_symbol(rules.inputs)
    if rules.tokens is None or symbol is None or symbol not in rules.profile.ranges:
        return {}
    side = recipe.merge(config)
    bounds: Range = rules.profile.ranges[symbol]
    mixes: dict[str, list[tuple[str, Grid]]] = {}
    for name, tokens in (("profile minimum", bounds.min), ("profile maximum", bounds.max)):
        rows = max(rows for rows in range(1, math.isqrt(tokens) + 1) if tokens % rows == 0)
        mixes[f"{name}: {tokens} {symbol}"] = [("image", (1, side * rows, side * (tokens // rows)))]
    return {**mixes, **_large(recipe, config, rules, bounds.max)}


def _large(
    recipe: Recipe[Any], config: Any, rules: SampleRules, most: int
) -> dict[str, list[tuple[str, Grid]]]:
    """Return one square frame and one line each way, of the sizes wanted or the largest of `most` cells."""
    merge = recipe.merge(config)
    square, line = -(-LONG // merge), -(-FAR // merge)
    kinds: dict[str, tuple[int, int, Callable[[int], Grid]]] = {
        "long frame": (square, math.isqrt(most), lambda cells: (1, merge * cells, merge * cells)),
        "far rows": (line, most, lambda cells: (1, merge * cells, merge)),
        "far columns": (line, most, lambda cells: (1, merge, merge * cells)),
    }
    chosen = {}
    for name, (size, limit, grid_of) in kinds.items():
        mixes = {cells: [("image", grid_of(cells))] for cells in range(min(size, limit), 0, -1)}
        fitting = (cells for cells, mix in mixes.items() if _misfit(recipe, config, mix, rules) is None)
        cells = next(fitting, size)
        short = "" if cells == size else f", {merge * size} do not fit"
        chosen[f"{name}: {merge * cells} a side{short}"] = mixes.get(cells) or [("image", grid_of(cells))]
    return chosen


def token_symbol(outputs: Sequence[TensorSpec]) -> Symbol | None:
    """Return the symbol that counts the rows of the first output."""
    return _row_symbol(outputs[:1])


def patch_symbol(inputs: Sequence[TensorSpec]) -> Symbol | None:
    """Return the symbol that counts the rows of `patches`; grids set it, whatever an output counts."""
    return _row_symbol([spec for spec in inputs if spec.name == "patches"])


def _row_symbol(specs: Sequence[TensorSpec]) -> Symbol | None:
    symbols = specs[0].symbols() if specs else {}
    return next((symbol for symbol, (axis, _) in symbols.items() if axis == 0), None)
