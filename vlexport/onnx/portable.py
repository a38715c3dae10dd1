"""Graphs around an engine, for programs that have numpy and a runtime of ONNX alone.

`tables.onnx` makes the engine's inputs but the patches, `prune.onnx` drops tokens of a video and
`positions.onnx` places a prompt. They are the host's own code, traced; what is around the traced selection
is text here. At the end are translations of torch's operators on indices that its ONNX exporter lacks: flat
tensors of integers.
"""

# mypy: disable-error-code="no-any-return"
# ruff: noqa: A002
# Translations have the signatures of torch's operators.

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, parser
from onnxscript import opset18
from torch import Tensor, nn

from vlexport._build.graph import Graph
from vlexport._build.sources import digest_with_imports
from vlexport.bundle.user_folders import CacheFile
from vlexport.codec import Json, canonical, encode
from vlexport.errors import UNEXPECTED, UnsupportedError
from vlexport.onnx.to_onnx import OPSET, Shapes, Translations, to_onnx
from vlexport.positions.plan import BlockRows, plan_columns, write_positions
from vlexport.pruning.compile import selection_part
from vlexport.pruning.methods import find_method
from vlexport.pruning.pixels import Chooser
from vlexport.pruning.selectors import Selector
from vlexport.specs import MediaItem, Symbol, TensorSpec
from vlexport.system import shortage
from vlexport.vision.attention.packing import Packing
from vlexport.vision.grid_tower import GridPacking

TABLES, PRUNE, POSITIONS = "tables.onnx", "prune.onnx", "positions.onnx"
# Where a bundle has rules that choose cells: one graph a rule, and the tables of a call of some cells.
SELECT, CELL_TABLES = "select_{}.onnx", "tables_cells.onnx"
LIBRARIES = ("torch", "onnx", "onnxscript", "onnx-ir")
# onnxscript's types are those of ONNX's values, and these functions take nodes.
op: Any = opset18


def portable_graphs(graph: Graph, selector: str | None, cells: Sequence[str] = ()) -> dict[str, bytes]:
    """Return the files by name, those made before from the user's cache; without a selector none prunes.

    cells  rules that choose what the engine gets
    """
    recipe, config, language = graph.recipe, graph.config, graph.recipe.language
    packing = recipe.packing(config)
    # A packing has no value to compare: it is what the recipe makes of the config.
    tables: list[Json] = [recipe.digest, encode(config), encode(graph.inputs)]
    positions = linear_positions if recipe.position_rule == "linear" else mrope_positions
    graphs = {
        TABLES: _kept(TABLES, tables, lambda: tables_graph(packing, graph.inputs)),
        POSITIONS: _kept(POSITIONS, [positions.__name__], positions),
    }
    for name in cells:
        graphs[SELECT.format(name)] = _kept(SELECT, [name, *tables], partial(select_graph, name, packing))
    if cells:
        graphs[CELL_TABLES] = _kept(
            CELL_TABLES, tables, lambda: tables_graph(packing, graph.inputs, some_cells=True)
        )
    if selector is not None:
        written = recipe.position_rule == "time_as_text"
        pace = 0.0 if written else language.tokens_per_second(config) if language else 1.0
        settings = (packing.merge, pace, language is not None and language.counts_frames, written)
        graphs[PRUNE] = _kept(
            PRUNE, [selector, *settings], lambda: prune_graph(find_method(selector), *settings)
        )
    return graphs


def _kept(name: str, settings: list[Json], make: Callable[[], onnx.ModelProto]) -> bytes:
    source = digest_with_imports(f"import {__name__}".encode())
    key = canonical([name, settings, source, {library: version(library) for library in LIBRARIES}])
    file = CacheFile.of("graphs", hashlib.sha256(key).hexdigest())
    content = file.recall()
    if content is None:
        content = make().SerializeToString()
        file.keep(content)
    return content


class _Tables(nn.Module):
    """All tables of integers of a call, from the structure of its media."""

    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self.packing = packing

    def forward(self, structure: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.packing.tables(structure, "grouped")


class _Select(nn.Module):
    """Which cells of an item stay by a rule, from its patches in cells: [T, H, W, patches, values]."""

    def __init__(self, name: str, packing: GridPacking) -> None:
        super().__init__()
        self.chooser, self.packing = Chooser(name), packing

    def forward(self, patches: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
        return self.chooser(self.packing.bytes_in_cells(patches), room)


def select_graph(name: str, packing: Packing) -> onnx.ModelProto:
    """Trace a rule that chooses cells; `room` is as long as there are cells to keep, or to keep at most."""
    assert isinstance(packing, GridPacking)
    dims = [Symbol(size) for size in ("frames", "rows", "columns")]
    taken: Shapes = {"patches": (*dims, packing.unit, packing.row_width), "room": (Symbol("room"),)}
    dtype = torch.float32 if packing.levels is None else torch.uint8
    patches = torch.zeros((6, 5, 7, packing.unit, packing.row_width), dtype=dtype)
    room = torch.zeros(70, dtype=torch.bool)
    return _traced(_Select(name, packing), (patches, room), taken, {"cells": (Symbol("room"),), "number": ()})


def tables_graph(
    packing: Packing, engine_inputs: Sequence[TensorSpec], *, some_cells: bool = False
) -> onnx.ModelProto:
    """Trace the tables of a call; its outputs have names and axes of the engine's inputs.

    some_cells  of items of some of their cells, whose indices among all cells of the call it takes too
    """
    mix = max(packing.mixes().values(), key=len)
    media = [
        MediaItem(kind=kind, patches=torch.empty(0), grid=grid, frame_groups=packing.frame_groups(kind, grid))
        for kind, grid in mix
    ]
    structure, counts = dict(packing.structure(media)), dict(packing.structure_rows)
    if some_cells:
        whole = sum(math.prod(item.grid) for item in media) // packing.unit
        structure["cells"], counts["cells"] = torch.arange(0, whole, 2), Symbol("kept")
    rows = {name: (counts[name], *tensor.shape[1:]) for name, tensor in structure.items()}
    tables = packing.tables(structure, "grouped")
    columns = {spec.name: spec.shape for spec in engine_inputs if spec.name in tables}
    assert list(columns) == list(tables), "an engine takes all tables of its packing"
    try:
        return _traced(_Tables(packing), (structure,), rows, columns)
    except UNEXPECTED as error:
        raise shortage(error) or UnsupportedError(
            f"the tables of {type(packing).__name__} cannot be traced into {TABLES}: "
            f"{str(error).splitlines()[0]} ({type(error).__name__}). Write `segments` and `row_tables` as "
            "tensor code, without loops over items, as recipes/README.md describes."
        ) from error


class _Positions(nn.Module):
    """Positions of a prompt from the blocks of its items, side by side in prompt order."""

    def forward(
        self, num_tokens: Tensor, offsets: Tensor, lengths: Tensor, blocks: Tensor, pruned: Tensor
    ) -> tuple[Tensor, Tensor]:
        plan = plan_columns(offsets, lengths, num_tokens.item())  # type: ignore[arg-type]
        rows = BlockRows(*torch.cat([blocks.new_zeros(4, 1), blocks], dim=1))
        anchor_1 = offsets.new_zeros(1)
        by_extent, by_width = (write_positions(plan, rows, anchor_1, flag) for flag in (False, True))
        table_3N = torch.where(pruned, by_width, by_extent)
        return table_3N, table_3N.amax((0, 1)) + 1 - num_tokens


def mrope_positions() -> onnx.ModelProto:
    """Trace positions of three axes."""
    names = ("num_tokens", "offsets", "lengths", "blocks", "pruned")
    items, rows = Symbol("items"), Symbol("rows")
    taken = dict(zip(names, ((), (items,), (items,), (4, rows), ()), strict=True))
    lengths = torch.tensor([2, 3])
    example = (torch.tensor(11), torch.tensor([1, 5]), lengths, torch.ones(4, 5).long(), torch.tensor(True))
    return _traced(_Positions(), example, taken, {"positions": (3, Symbol("num_tokens")), "delta": ()})


class _Linear(nn.Module):
    """Positions that count up from 0."""

    def forward(self, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(num_tokens.item())[None], num_tokens - num_tokens


def linear_positions() -> onnx.ModelProto:
    """Trace positions of one axis."""
    outputs: Shapes = {"positions": (1, Symbol("num_tokens")), "delta": ()}
    return _traced(_Linear(), (torch.tensor(11),), {"num_tokens": ()}, outputs)


def _traced(
    module: nn.Module, example: tuple[object, ...], taken: Shapes, outputs: Shapes
) -> onnx.ModelProto:
    dims: dict[Symbol, object] = {}

    def varying(name: str) -> dict[int, object]:
        sizes = enumerate(taken[name])
        return {
            axis: dims.setdefault(size, torch.export.Dim(size.name, min=1))
            for axis, size in sizes
            if isinstance(size, Symbol)
        }

    axes = {name: varying(name) for name in taken}
    nested = isinstance(example[0], dict)
    program = torch.export.export(
        module.eval(), example, dynamic_shapes=(axes,) if nested else tuple(axes.values()), strict=False
    )
    return _bare(ir.to_proto(to_onnx(program, taken, outputs, translations=TRANSLATIONS)))


def _bare(model: onnx.ModelProto) -> onnx.ModelProto:
    for node in model.graph.node:
        del node.metadata_props[:]
    del model.graph.metadata_props[:], model.metadata_props[:], model.graph.value_info[:]
    return model


# The count is that of `retained_count`, in doubles; times are those of `pruned_times`, or of `unpruned_times`
# at a rate of 0.
PRUNE_TEXT = """
<ir_version: 10, opset_import: ["": {opset}]>
prune (float[tokens, width] embeds, int64[3] grid, double rate, float seconds_per_grid)
    => (float[kept, width] kept_embeds, int64[kept] kept, int64[4, kept] block)
{{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    merge = Constant <value_ints = [{merge}]> ()
    frames = Slice (grid, zero, one)
    height = Slice (grid, one, two)
    width = Slice (grid, two, three)
    rows = Div (height, merge)
    columns = Div (width, merge)
    per_frame = Mul (rows, columns)
    rest = Constant <value_ints = [-1]> ()
    shape = Concat <axis = 0> (frames, per_frame, rest)
    selection_embeds = Reshape (embeds, shape)
    total = Mul (frames, per_frame)
    total_64 = Cast <to = 11> (total)
    all = Constant <value = double {{1.0}}> ()
    share_64 = Sub (all, rate)
    wanted_64 = Mul (total_64, share_64)
    wanted = Cast <to = 7> (wanted_64)
    count = Max (wanted, {least})
    share = Cast <to = 1> (share_64)
    selection_share = Expand (share, count)
    keeps_all = Equal (count, total)
    begin = Squeeze (zero)
    end = Squeeze (total)
    step_one = Squeeze (one)
    kept_embeds, kept = If (keeps_all) <
        then_branch = whole () => (float[tokens, width] whole_rows, int64[tokens] whole_kept) {{
            whole_rows = Identity (embeds)
            whole_kept = Range (begin, end, step_one)
        }},
        else_branch = selection () => (float[kept, width] selection_rows, int64[kept] selection_kept) {{
        }}
    >
    frame = Div (kept, per_frame)
    frame_first = Mul (frame, per_frame)
    cell = Sub (kept, frame_first)
    row = Div (cell, columns)
    row_first = Mul (row, columns)
    column = Sub (cell, row_first)
    kept_size = Shape (kept)
    advance = {advance}
    merged_width = Expand (advance, kept_size)
    seconds_64 = {seconds}
    seconds = Floor (seconds_64)
    pace = Constant <value = double {{{pace}}}> ()
    step_64 = Mul (pace, seconds)
    step = Cast <to = 1> (step_64)
    frame_32 = Cast <to = 1> (frame)
    pruned_time_32 = Mul (frame_32, step)
    pruned_time = Cast <to = 7> (pruned_time_32)
    exact_step = Mul (seconds_64, pace)
    frame_64 = Cast <to = 11> (frame)
    whole_time_64 = Mul (frame_64, exact_step)
    whole_time = Cast <to = 7> (whole_time_64)
    none = Constant <value = double {{0.0}}> ()
    is_whole = Equal (rate, none)
    time = Where (is_whole, whole_time, pruned_time)
    channels = Concat <axis = 0> (time, row, column, merged_width)
    four = Constant <value_ints = [4, -1]> ()
    block = Reshape (channels, four)
}}
"""


def prune_graph(
    selector: Selector, merge: int, pace: float, counts_frames: bool, written: bool = False
) -> onnx.ModelProto:
    """Join the traced selection with the count before it and the block of what is kept after it.

    pace           positions of time per second
    counts_frames  the time between two frames counts as 1, whatever is given
    written        time is written between frames: text goes on behind the larger side of each
    """
    least = selector.least_kept("per_frame", "frames")
    values = {
        "opset": OPSET,
        "merge": merge,
        "least": "one" if least == 1 else least,
        "seconds": "Constant <value = double {1.0}> ()"
        if counts_frames
        else "Cast <to = 11> (seconds_per_grid)",
        "pace": repr(float(pace)),
        "advance": "Max (rows, columns)" if written else "Identity (columns)",
    }
    model = parser.parse_model(PRUNE_TEXT.format(**values))
    traced = _bare(ir.to_proto(selection_model(selector, "float32")))
    _rename(traced.graph, "selection_")
    branch = next(node for node in model.graph.node if node.op_type == "If").attribute[1].g
    branch.node.extend(traced.graph.node)
    branch.initializer.extend(traced.graph.initializer)
    onnx.checker.check_model(model)
    return model


def selection_model(selector: Selector, dtype: str) -> ir.Model:
    """Translate the selection, `embeds` and `share` to `rows` and `kept`."""
    part = selection_part(selector.portable(), dtype)
    program = torch.export.export(part.program.eval(), part.example, dynamic_shapes=part.sizes, strict=False)
    frames, tokens, width, kept = map(Symbol, ("frames", "tokens", "width", "kept"))
    taken: Shapes = {"embeds": (frames, tokens, width), "share": (kept,)}
    return to_onnx(program, taken, {"rows": (kept, width), "kept": (kept,)})


def _rename(graph: onnx.GraphProto, prefix: str) -> None:
    """Begin all names with a prefix, those inside of loops too."""
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = prefix + value.name
    for node in graph.node:
        node.input[:] = [prefix + name if name else name for name in node.input]
        node.output[:] = [prefix + name if name else name for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, prefix)


# Beyond every length.
FAR = 2**62


def repeats(counts: ir.Value, output_size: int | None = None) -> ir.Value:
    """Repeat each index so often: one more wherever another index begins."""
    one, axis = op.Constant(value_ints=[1]), op.Constant(value_int=0)
    ends = op.CumSum(counts, axis)
    total = op.ReduceSum(counts, keepdims=1)
    # What has no repeats at the end begins one place behind the last.
    marks = _counted(ends - counts, total + one)
    return op.Slice(op.CumSum(marks, axis) - one, op.Constant(value_ints=[0]), total)


def repeat_interleave(
    x: ir.Value, counts: ir.Value, dim: int | None = None, output_size: int | None = None
) -> ir.Value:
    """Repeat each value so often."""
    return op.Gather(x, repeats(counts), axis=0)


def bincount(x: ir.Value, weights: None = None, minlength: int = 0) -> ir.Value:
    """Count each number up to the largest."""
    return _counted(x, op.ReduceMax(x, keepdims=1) + op.Constant(value_ints=[1]))


def _counted(x: ir.Value, size: ir.Value) -> ir.Value:
    none = op.Expand(op.Constant(value_ints=[0]), size)
    ones = op.Expand(op.Constant(value_ints=[1]), op.Shape(x))
    return op.ScatterElements(none, x, ones, axis=0, reduction="add")


def unique_consecutive(
    x: ir.Value, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return values and lengths of runs; the inverse is empty, for nobody reads it."""
    zero, one, far = (op.Constant(value_ints=[value]) for value in (0, 1, FAR))
    same = op.Equal(op.Slice(x, one, far), op.Slice(x, zero, op.Constant(value_ints=[-1])))
    begins = op.Concat(op.Cast(one, to=TensorProto.BOOL), op.Not(same), axis=0)
    starts = op.Squeeze(op.NonZero(begins), zero)
    ends = op.Concat(op.Slice(starts, one, far), op.Shape(x), axis=0)
    return op.Gather(x, starts), op.Expand(zero, zero), ends - starts


def argsort(x: ir.Value, stable: bool = True, dim: int = -1, descending: bool = False) -> ir.Value:
    """Sort stably: of equal values TopK takes the lower index first."""
    _, order = op.TopK(x, op.Shape(x), axis=0, largest=int(descending), sorted=1)
    return order


def unique_rows(
    x: ir.Value, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Sort rows by their first number that differs, and number each row by them."""
    rows, _, inverse, counts = op.Unique(x, axis=dim, sorted=1)
    return rows, inverse, counts


def bucketize(x: ir.Value, bounds: ir.Value, out_int32: bool = False, right: bool = False) -> ir.Value:
    """Count the bounds up to each value; with `right`, one that is the value itself too."""
    last = op.Constant(value_ints=[-1])
    below = (op.GreaterOrEqual if right else op.Greater)(op.Unsqueeze(x, last), bounds)
    return op.ReduceSum(op.Cast(below, to=TensorProto.INT64), last, keepdims=0)


def steps(start: float, end: float, step: float, **_: object) -> ir.Value:
    """Return torch's own numbers as a constant: ONNX adds floats in another way."""
    return op.Constant(value=ir.tensor(torch.arange(start, end, step).numpy()))


TRANSLATIONS: Translations = {
    torch.ops.aten.repeat_interleave.Tensor: repeats,
    torch.ops.aten.repeat_interleave.self_Tensor: repeat_interleave,
    torch.ops.aten.bincount.default: bincount,
    torch.ops.aten.unique_consecutive.default: unique_consecutive,
    torch.ops.aten.argsort.stable: argsort,
    torch.ops.aten.unique_dim.default: unique_rows,
    torch.ops.aten.bucketize.Tensor: bucketize,
    torch.ops.aten.arange.start_step: steps,
}
