"""An exported program as an ONNX model with the names of the engine's inputs and outputs."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from onnxscript import optimizer
from onnxscript.rewriter import MatchResult, onnx_fusions
from onnxscript.rewriter.rules.common import slice_split_rule
from onnxscript.values import Op
from torch.onnx._internal.exporter._registration import ONNXRegistry

from vlexport.onnx import attention
from vlexport.specs import Dim, Multiple, Symbol

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from vlexport._build.graph import Graph

# Standard operators of this opset are what every runtime that we build for accepts.
OPSET = 18
# These warn about torchvision's absence, which no tower here uses, about norms whose cast weights stay, and
# about empty lists of torch's own translations.
NOISY = (
    "torch.onnx._internal.exporter._registration",
    "onnxscript.optimizer._constant_folding",
    "onnx_ir._convenience",
)
# The key of a node's modules, which viewers group by.
MODULES = "namespace"
# Rules of several nodes look for each of them before they forget an earlier one.
SMALL = f"""
<ir_version: 10, opset_import: ["": {OPSET}]>
small (float[1, 4] x) => (float[1, 2] y)
<int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] four = {{4}}, int64[1] last = {{1}}> {{
    first = Slice (x, zero, two, last)
    second = Slice (x, two, four, last)
    y = Mul (first, second)
}}
"""
Translation = Callable[..., Any]
Translations = Mapping[Callable[..., Any], Translation]
# Names of inputs or outputs in order, with their sizes.
Shapes = Mapping[str, Sequence[Dim]]
_table = cache(ONNXRegistry.from_torchlib)


def graph_model(graph: Graph, opset: int = OPSET, *, dense: Translation | None = None) -> ir.Model:
    """Translate a traced tower, with the names of its inputs and outputs."""
    inputs, outputs = ({spec.name: spec.shape for spec in ends} for ends in (graph.inputs, graph.outputs))
    return to_onnx(graph.program, inputs, outputs, opset, dense=dense)


def to_onnx(
    program: ExportedProgram,
    inputs: Shapes,
    outputs: Shapes,
    opset: int = OPSET,
    *,
    dense: Translation | None = None,
    translations: Translations | None = None,
) -> ir.Model:
    """Translate with torch's own exporter; attention over runs becomes one function of the model.

    `dense`: of dense attention, in place of the exporter's with its guard for rows that see no key, of which
    our towers have none; its comparison with NaN keeps a runtime from seeing attention in these operators.
    `translations`: of further operators.
    """
    table: dict[Callable[..., Any], Translation] = {
        torch.ops.vlexport.segment_attention.default: _translation(attention.SEGMENT_ATTENTION),
        torch.ops.vlexport.segment_cross_attention.default: _translation(attention.SEGMENT_CROSS_ATTENTION),
    }
    table |= translations or {}
    if dense is not None:
        table[torch.ops.aten.scaled_dot_product_attention.default] = dense
    noisy = {logging.getLogger(name): logging.getLogger(name).level for name in NOISY}
    try:
        for logger in noisy:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), quick_exporter():
            warnings.simplefilter("ignore", FutureWarning)
            translated = torch.onnx.export(
                program, (), dynamo=True, opset_version=opset, verbose=False, custom_translation_table=table
            )
    finally:
        for logger, level in noisy.items():
            logger.setLevel(level)
    assert translated is not None
    model: ir.Model = translated.model
    values = (*model.graph.inputs, *model.graph.outputs)
    for value, name in zip(values, (*inputs, *outputs), strict=True):
        value.name = name
    _name_axes(model, {**inputs, **outputs})
    _drop_traces(model)
    attention.define_all(model)
    return model


@contextmanager
def quick_exporter() -> Iterator[None]:
    """Leave out what torch's exporter does in vain, and what it keeps.

    A rule of the optimiser lists the whole graph where there is no slice (8 s of 25), and the table of all
    operators is made anew for each graph (1 s).
    """
    rule: Any = slice_split_rule
    tried = rule.match

    def match(model: ir.Model, graph: ir.Graph | ir.Function, node: ir.Node, **options: Any) -> MatchResult:
        if node.op_type != "Slice":
            return MatchResult().fail("not a slice")
        result: MatchResult = tried(model, graph, node, **options)
        return result

    made = vars(ONNXRegistry)["from_torchlib"]
    rule.match, ONNXRegistry.from_torchlib = match, staticmethod(_operators)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        rule.match, ONNXRegistry.from_torchlib = tried, made  # type: ignore[method-assign]
        # Rules keep the last model that they were tried on, with its weights: now this one.
        small = ir.from_onnx_text(SMALL)
        optimizer.optimize_ir(small)
        onnx_fusions.fuse(small)


def _operators(opset_version: int) -> ONNXRegistry:
    """Return a table to which translations are added."""
    table = copy(_table(opset_version))
    table.functions = {name: list(functions) for name, functions in table.functions.items()}
    return table


def _drop_traces(model: ir.Model) -> None:
    """Leave each node the names of its modules alone: the exporter's traces name folders of this machine."""
    for node in (*model.graph.all_nodes(), *(inner for body in model.functions.values() for inner in body)):
        modules = node.metadata_props.get(MODULES)
        node.metadata_props.clear()
        if modules is not None:
            node.metadata_props[MODULES] = modules


def _name_axes(model: ir.Model, shapes: Shapes) -> None:
    """Give axes of all values the names of their symbols, `tokens`, in place of the trace's, `s11`."""
    names: dict[str, str] = {}
    for value in (*model.graph.inputs, *model.graph.outputs):
        sizes = shapes[value.name or ""]
        for traced, dim in zip(value.shape or (), sizes, strict=False):
            if isinstance(dim, Multiple):
                names[str(traced).removeprefix(f"{dim.factor}*")] = str(dim.symbol)
            elif isinstance(dim, Symbol):
                names[str(traced)] = str(dim)
        if sizes:
            value.shape = ir.Shape([dim if isinstance(dim, int) else str(dim) for dim in sizes])

    def named(dim: ir.SymbolicDim | int) -> ir.SymbolicDim | int:
        if isinstance(dim, int) or dim.value is None:
            return dim
        return ir.SymbolicDim(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), dim.value))

    for value in (output for node in model.graph.all_nodes() for output in node.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([named(dim) for dim in value.shape])


def _translation(operator: Op) -> Callable[..., ir.Value]:
    def translate(q: ir.Value, k: ir.Value, v: ir.Value, runs: ir.Value, scale: float) -> ir.Value:
        heads = q.shape[1] if q.shape is not None else None
        assert isinstance(heads, int), "the number of heads is fixed"
        result: ir.Value = operator(q, k, v, runs, scale=scale, num_heads=heads)
        return result

    return translate
