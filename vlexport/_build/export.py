"""Recipe and checkpoint to a graph: load the tower, trace it once with every varying axis dynamic."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._export.utils import _get_shape_env_from_gm
from torch.utils._pytree import tree_unflatten

from vlexport._build.graph import Graph, TowerSpec
from vlexport.checkpoint import Checkpoint
from vlexport.codec import checked, decode, encode
from vlexport.errors import UnsupportedError
from vlexport.recipe import Recipe
from vlexport.specs import (
    PIXELS,
    Dim,
    Multiple,
    Precision,
    Quantisation,
    ShapeProfile,
    Symbol,
    TensorSpec,
)
from vlexport.system import ONE_BUILD, compile_caches
from vlexport.vision.attention.layout import LAYOUTS

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.dynamic_shapes import Dim as ExportDim

_NAMES = "names.json"


def export(  # noqa: PLR0913  what a graph depends on, word by word
    recipe: Recipe[Any],
    checkpoint: Checkpoint,
    *,
    profile: ShapeProfile | None = None,
    dtype: str = "float32",
    input_dtype: str = PIXELS,
    form: str = LAYOUTS[0],
    fp32_layers: Mapping[str, str] | None = None,
    quantisation: Quantisation | None = None,
) -> Graph:
    """Trace the tower of `checkpoint`; without a profile the recipe's first one is taken.

    input_dtype  of patches: `float32`, normalised, or `uint8`, which the graph normalises
    """
    checked("recipe", recipe, Recipe)
    checked("checkpoint", checkpoint, Checkpoint)
    if form not in LAYOUTS:
        raise UnsupportedError(f"no attention layout '{form}'. There are: {', '.join(sorted(LAYOUTS))}.")
    config = recipe.read_config(checkpoint, input_dtype)
    return trace(
        TowerSpec(
            recipe=recipe,
            checkpoint=checkpoint,
            config=config,
            precision=Precision(dtype=dtype, fp32_layers=fp32_layers or {}, quantisation=quantisation),
            form=form,
            profile=profile or next(iter(recipe.profiles(config).values())),
        )
    )


def trace(spec: TowerSpec, module: nn.Module | None = None) -> Graph:
    """Trace the tower, or a module that takes the same inputs, such as one with taps around it."""
    recipe, config, precision = spec.recipe, spec.config, spec.precision
    module = module or spec.tower()
    axes = recipe.axes(config, spec.form)
    example = example_inputs(recipe, config, precision.dtype, spec.form)
    sizes = {} if recipe.packing(config).is_one else axes
    varying = {
        name: {axis: _export_dim(dim) for axis, dim in sizes.get(name, {}).items()} for name in example
    }
    with ONE_BUILD, compile_caches():
        program = torch.export.export(module, (example,), dynamic_shapes=(varying,), strict=False)
    return Graph(
        **spec.shared(),
        module=module,
        inputs=specs_of(example, axes),
        outputs=specs_of(_outputs(program), axes),
        program=program,
    )


def _outputs(program: ExportedProgram) -> dict[str, Tensor]:
    (last,) = (node for node in program.graph.nodes if node.op == "output")
    traced = [node.meta["val"] for node in last.args[0]]
    outputs: dict[str, Tensor] = tree_unflatten(traced, program.call_spec.out_spec)
    return outputs


def without_weights(graph: Graph) -> bytes:
    """Return a graph as bytes from which `with_weights` makes it again; its weights are the checkpoint's."""
    program, file = graph.program, io.BytesIO()
    weights = dict(program.state_dict)
    named = encode(_Names(inputs=graph.inputs, outputs=graph.outputs))
    try:
        for name, tensor in weights.items():
            stand_in = tensor.detach().new_empty(1).expand(tensor.shape)
            if isinstance(tensor, nn.Parameter):
                # So the signature of the program has it, and torch compares them.
                stand_in = nn.Parameter(stand_in, requires_grad=False)
            program.state_dict[name] = stand_in
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No complete tensor found", category=UserWarning)
            torch.export.save(program, file, extra_files={_NAMES: json.dumps(named)})
    finally:
        program.state_dict.update(weights)
    return file.getvalue()


def with_weights(spec: TowerSpec, content: bytes) -> Graph:
    """Return the graph that `without_weights` stored, with weights read from the checkpoint again."""
    import vlexport.vision.attention.kernels  # noqa: F401  defines the attention operator of the program

    stored = {_NAMES: ""}
    program = torch.export.load(io.BytesIO(content), extra_files=stored)
    # WORKAROUND(torch 2.13): it loads ranges of products, `4*s0`, as if of sizes, and decomposes nothing so.
    sizes = _get_shape_env_from_gm(program.graph_module)
    assert sizes is not None, "the number of patches is free"
    for product in [size for size in sizes.var_to_range if not size.is_Symbol]:
        del sizes.var_to_range[product]
    tower = spec.tower()
    weights = tower.state_dict(keep_vars=True)
    program.state_dict.update({name: weights[name] for name in program.state_dict})
    named = decode(_Names, json.loads(stored[_NAMES]))
    return Graph(**spec.shared(), module=tower, inputs=named.inputs, outputs=named.outputs, program=program)


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The tensors of a stored graph."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def specs_of(tensors: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, Dim]]) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors, with a symbol at each axis that varies."""
    return tuple(
        TensorSpec(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(
                axes[name][axis] if axis in axes.get(name, {}) else int(size)
                for axis, size in enumerate(tensor.shape)
            ),
        )
        for name, tensor in tensors.items()
    )


def example_inputs(recipe: Recipe[Any], config: Any, dtype: str, form: str) -> dict[str, Tensor]:
    """Return inputs of the recipe's largest mix: no symbol is 1 there, so the trace specialises none."""
    mixes = list(recipe.shape_sets(config).values())[: 1 if recipe.packing(config).is_one else None]
    shapes = max(
        mixes, key=lambda mix: (len({grid for _, grid in mix}), sum(math.prod(grid) for _, grid in mix))
    )
    width = recipe.row_width(config)
    kept: torch.dtype = getattr(torch, recipe.input_dtype(config))
    media = [
        recipe.item(config, kind, grid, torch.zeros(math.prod(grid), width, dtype=kept))
        for kind, grid in shapes
    ]
    return cast_floats(recipe.prepare(config, media, form), dtype)


def cast_floats(inputs: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Cast pixels and rows of blocks to the graph's dtype; bytes and tables keep theirs."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    return {
        name: tensor.to(torch_dtype) if is_typed(name) and tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def is_typed(name: str) -> bool:
    """Return whether an input has the graph's dtype; tables of integers or weights have their own."""
    return name == "patches" or name.startswith("rows_")


def _export_dim(dim: Dim) -> ExportDim:
    """Return the size for torch; the engine enforces the profile, so the trace has no upper bound."""
    if isinstance(dim, Multiple):
        return dim.factor * _export_dim(dim.symbol)
    assert isinstance(dim, Symbol), "fixed sizes are not dynamic"
    return torch.export.Dim(dim.name, min=1)
