"""Functions spelled out where they are called, for runtimes that know none of ours."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass


def inline(model: ir.Model) -> None:
    """Replace calls of model-local functions by their bodies, with types on what their loops carry."""
    InlinePass()(model)
    for node in model.graph.all_nodes():
        if node.op_type == "Loop":
            _type_loop(node)


def _type_loop(node: ir.Node) -> None:
    """Add types to a loop's body: importers that read it on its own need them."""
    body = node.attributes["body"].as_graph()
    index, condition, *carried = body.inputs
    index.type, index.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
    condition.type, condition.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
    for inside, outside in zip(carried, node.inputs[2:], strict=True):
        inside.type = _type_of(outside)


def _type_of(value: ir.Value | None) -> ir.TypeProtocol | None:
    """Return the type of a value, or of what it is cut out of."""
    while value is not None and value.type is None:
        producer = value.producer()
        assert producer is not None, "inputs are typed"
        assert producer.op_type == "Slice", f"{producer.op_type} between a typed value and a loop"
        value = producer.inputs[0]
    return None if value is None else value.type
