"""Random towers of a chosen size on disk, without decoder and tokenizer, and random media for them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlexport.checkpoint import CheckpointContents, RandomTensor
from vlexport.errors import RequestError
from vlexport.recipe import Recipe, list_recipes
from vlexport.specs import MediaItem

Grid = tuple[int, int, int]


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
    """Numbers of the random language model that reads what the tower gives; as wide as the tower's tokens."""

    heads: int
    kv_heads: int
    layers: int
    inner: int
    vocabulary: int


def default_recipe() -> str:
    """The first recipe, by name, whose tower has windows: they are what exports get wrong."""
    for card in list_recipes():
        if _has_demo(card.name) and "window_size" in _vision(_demo(card.name).contents()):
            return card.name
    raise RequestError("no recipe with a windowed tower and a demo ships; name a recipe with --recipe.")


def _has_demo(recipe: str) -> bool:
    return importlib.util.find_spec(f"vlexport.recipes.demo.{recipe}") is not None


def _demo(recipe: str) -> Any:
    if not _has_demo(recipe):
        known = sorted(card.name for card in list_recipes() if _has_demo(card.name))
        raise RequestError(
            f"recipe '{recipe}' has no random tower to measure. These have: {', '.join(known)}."
        )
    return importlib.import_module(f"vlexport.recipes.demo.{recipe}")


def _vision(contents: CheckpointContents) -> dict[str, object]:
    found = contents.config.get("vision_config", {})
    assert isinstance(found, dict)
    return found


def contents_of(recipe: str, size: TowerSize, decoder: DecoderSize | None = None) -> CheckpointContents:
    """What the recipe's random checkpoint holds at this size: the tower, and a decoder if asked for."""
    demo = _demo(recipe)
    gain = {} if size.branch_gain == 1.0 else {"branch_gain": size.branch_gain}
    sizes = replace(
        demo.DEFAULT,
        **gain,
        depth=size.depth,
        hidden=size.width,
        heads=size.heads,
        inner=size.inner,
        out=size.out,
        with_decoder=decoder is not None,
    )
    if decoder is not None:
        if not hasattr(demo, "Text"):
            raise RequestError(
                f"recipe '{recipe}' has no random decoder of a chosen size, so nothing can be asked of it."
            )
        sizes = replace(sizes, text=demo.Text(width=size.out, **asdict(decoder)))
    found: CheckpointContents = demo.contents(sizes)
    vision = {**_vision(found), "fullatt_block_indexes": list(size.full_blocks)}
    return replace(found, config={**found.config, "vision_config": vision})


def write_tower(folder: Path, contents: CheckpointContents, seed: int = 0) -> Path:
    """Write config files and the tower's tensors; the folder is whole or absent."""
    from safetensors.torch import save_file

    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, values in {"config.json": contents.config, **contents.files}.items():
            (beside / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        tensors = {name: _draw(name, wanted, seed) for name, wanted in contents.tensors.items()}
        save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
        beside.replace(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _draw(name: str, wanted: RandomTensor, seed: int) -> torch.Tensor:
    key = hashlib.sha256(f"{seed}/{wanted.stream or name}".encode()).digest()
    source = torch.Generator().manual_seed(int.from_bytes(key[:7]))
    values = torch.randn(wanted.shape, generator=source) * wanted.std + wanted.mean
    values[: wanted.doubled_rows] *= 2.0
    return values


def random_items(recipe: Recipe[Any], config: Any, grids: Sequence[Grid], seed: int = 0) -> list[MediaItem]:
    """Items of these grids with normally distributed patches; more than one frame makes a video."""
    source = torch.Generator().manual_seed(seed)
    width = recipe.row_width(config)
    return [
        MediaItem(
            kind="image" if grid[0] == 1 else "video",
            patches=torch.randn(num_patches([grid]), width, generator=source),
            grid=grid,
        )
        for grid in grids
    ]


def num_patches(grids: Sequence[Sequence[int]]) -> int:
    """Patches of a call."""
    return sum(math.prod(grid) for grid in grids)
