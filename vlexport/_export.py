"""Recipe and checkpoint to a graph: load the tower, trace it once with every varying axis dynamic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.graph import Graph
from vlexport.recipe import Recipe
from vlexport.specs import Dim, MediaItem, Multiple, Quantisation, ShapeProfile, Symbol, TensorSpec
from vlexport.vision.attention.layout import LAYOUTS
from vlexport.vision.islands import WIDE, with_islands

if TYPE_CHECKING:
    from torch.export.dynamic_shapes import Dim as ExportDim


def export(  # noqa: PLR0913  what a graph depends on, word by word
    recipe: Recipe[Any],
    checkpoint: Checkpoint,
    *,
    profile: ShapeProfile | None = None,
    dtype: str = "float32",
    form: str = LAYOUTS[0],
    islands: Mapping[str, str] | None = None,
    quantisation: Quantisation | None = None,
) -> Graph:
    """Trace the tower of `checkpoint`; without a profile the recipe's first one is taken."""
    if form not in LAYOUTS:
        raise UnsupportedError(f"no attention layout '{form}'. There are: {', '.join(sorted(LAYOUTS))}.")
    profile = profile or next(iter(recipe.profiles(recipe.read_config(checkpoint)).values()))
    module = typed_tower(recipe, checkpoint, dtype, islands or {})
    options = TraceOptions(
        profile=profile, dtype=dtype, form=form, islands=islands or {}, quantisation=quantisation
    )
    return trace(recipe, checkpoint, module, options)


def typed_tower(
    recipe: Recipe[Any], checkpoint: Checkpoint, dtype: str, islands: Mapping[str, str]
) -> nn.Module:
    """The tower in `dtype`, but for the parts that `islands` names."""
    if not islands:
        return recipe.tower(checkpoint, dtype)
    return with_islands(recipe.tower(checkpoint, WIDE), dtype, islands)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """What a graph is traced for."""

    profile: ShapeProfile
    dtype: str
    form: str
    islands: Mapping[str, str] = field(default_factory=dict)
    quantisation: Quantisation | None = None


def trace(recipe: Recipe[Any], checkpoint: Checkpoint, module: nn.Module, options: TraceOptions) -> Graph:
    """Trace a module that takes the recipe's inputs; a tower, or one with taps around it."""
    config = recipe.read_config(checkpoint)
    axes = recipe.axes(config, options.form)
    example = example_inputs(recipe, config, options.dtype, options.form)
    with torch.inference_mode():
        result = module(example)
    program = torch.export.export(
        module,
        (example,),
        dynamic_shapes=({name: _dynamic(axes.get(name, {})) for name in example},),
        strict=False,
    )
    return Graph(
        recipe=recipe,
        checkpoint=checkpoint,
        config=config,
        dtype=options.dtype,
        quantisation=options.quantisation,
        form=options.form,
        profile=options.profile,
        inputs=tuple(_spec(name, tensor, axes) for name, tensor in example.items()),
        outputs=tuple(_spec(name, tensor, axes) for name, tensor in result.items()),
        program=program,
        islands=options.islands,
    )


def example_inputs(recipe: Recipe[Any], config: Any, dtype: str, form: str) -> dict[str, Tensor]:
    """Inputs of the largest mix of the recipe's shape sets: no symbol is 1 there, so none is specialised."""
    mixes = recipe.shape_sets(config).values()
    shapes = max(
        mixes, key=lambda mix: (len({grid for _, grid in mix}), sum(t * h * w for _, (t, h, w) in mix))
    )
    media = [blank_item(recipe, config, kind, grid) for kind, grid in shapes]
    inputs = recipe.prepare(config, media, form)
    return cast_floats(inputs, dtype)


def blank_item(recipe: Recipe[Any], config: Any, kind: str, grid: tuple[int, int, int]) -> MediaItem:
    """An item of this grid with zero pixels."""
    rows, columns = grid[0] * grid[1] * grid[2], recipe.row_width(config)
    return recipe.item(config, kind, grid, torch.zeros(rows, columns))


def cast_floats(inputs: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Patches, and rows of blocks, in the graph's dtype; tables as they are: integers, or float32 weights."""
    wanted: torch.dtype = getattr(torch, dtype)
    return {
        name: tensor.to(wanted) if is_typed(name) and tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def is_typed(name: str) -> bool:
    """Whether an input has the graph's dtype; tables say what something means, and do not lose digits."""
    return name == "patches" or name.startswith("rows_")


def _dynamic(varying: Mapping[int, Dim]) -> dict[int, ExportDim]:
    return {axis: _export_dim(dim) for axis, dim in varying.items()}


def _export_dim(dim: Dim) -> ExportDim:
    """The bounds of the profile are held by the engine; the trace stays open above."""
    if isinstance(dim, Multiple):
        return dim.factor * _export_dim(dim.symbol)
    assert isinstance(dim, Symbol), "fixed sizes are not dynamic"
    return torch.export.Dim(dim.name, min=1)


def _spec(name: str, tensor: Tensor, axes: Mapping[str, Mapping[int, Dim]]) -> TensorSpec:
    varying = axes.get(name, {})
    shape = tuple(varying.get(axis, size) for axis, size in enumerate(tensor.shape))
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=shape)
