"""Random towers of a chosen size on disk, and random media for them."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vlexport.recipes.demo.parts import Text
from vlexport.recipes.demo.qwen2_5_vl import Tiny
from vlexport.recipes.demo.writing import write_checkpoint

from vlexport.errors import RequestError
from vlexport.recipe import Recipe, list_recipes
from vlexport.specs import MediaItem

Grid = tuple[int, int, int]
# The numbers of the released Qwen2.5-VL of three billion weights.
THREE_BILLION = Tiny(
    depth=32, hidden=1280, heads=16, inner=3420, out=2048, dtype="bfloat16",
    text=Text(
        width=2048, heads=16, kv_heads=2, layers=36, inner=11008,
        vocabulary=151936, max_tokens=128000, tied=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerSize:
    """Numbers of a tower; blocks that are not listed as full attend inside windows.

    branch_gain  of what a block adds to its rows; at 1/sqrt(2 * depth) rounding errors do not grow with depth
    """

    depth: int
    width: int
    heads: int
    inner: int
    out: int
    full_blocks: tuple[int, ...]
    branch_gain: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSize:
    """Numbers of the random language model behind a tower; as wide as the tower's tokens."""

    heads: int
    kv_heads: int
    layers: int
    inner: int
    vocabulary: int


def _demos() -> list[str]:
    names = sorted(card.name for card in list_recipes())
    return [name for name in names if importlib.util.find_spec(f"vlexport.recipes.demo.{name}")]


def _demo(recipe: str) -> Any:
    if recipe not in _demos():
        raise RequestError(f"recipe '{recipe}' has no random tower. These have: {', '.join(_demos())}.")
    return importlib.import_module(f"vlexport.recipes.demo.{recipe}")


def default_recipe() -> str:
    """Return the first recipe, by name, whose tower has windows: they are what exports get wrong."""
    for name in _demos():
        if "window_size" in _demo(name).contents().config.get("vision_config", {}):
            return name
    raise RequestError("no recipe with a windowed tower and a demo ships; name a recipe with --recipe.")


def write_tower(
    folder: Path, recipe: str, size: TowerSize, decoder: DecoderSize | None = None, seed: int = 0
) -> Path:
    """Write the recipe's random checkpoint at this size, with a decoder if wanted, unless it is there."""
    if folder.is_dir():
        return folder
    demo = _demo(recipe)
    if decoder is not None and not hasattr(demo.DEFAULT, "text"):
        raise RequestError(f"recipe '{recipe}' has no random decoder of a chosen size to answer with.")
    numbers: dict[str, Any] = {"hidden": size.width, "with_decoder": decoder is not None}
    numbers |= {name: getattr(size, name) for name in ("depth", "heads", "inner", "out")}
    numbers |= {} if size.branch_gain == 1.0 else {"branch_gain": size.branch_gain}
    numbers |= {} if decoder is None else {"text": Text(width=size.out, **asdict(decoder))}
    found = demo.contents(replace(demo.DEFAULT, **numbers))
    vision = {**found.config["vision_config"], "fullatt_block_indexes": list(size.full_blocks)}
    write_checkpoint(folder, replace(found, config={**found.config, "vision_config": vision}), seed=seed)
    return folder


def random_items(recipe: Recipe[Any], config: Any, grids: Sequence[Grid], seed: int = 0) -> list[MediaItem]:
    """Return items of these grids with normally distributed patches; several frames make a video."""
    source = torch.Generator().manual_seed(seed)
    width = recipe.row_width(config)
    return [
        MediaItem(
            kind="image" if grid[0] == 1 else "video",
            patches=torch.randn(math.prod(grid), width, generator=source),
            grid=grid,
        )
        for grid in grids
    ]


def num_patches(grids: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(grid) for grid in grids)
