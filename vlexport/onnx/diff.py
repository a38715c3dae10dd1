"""Differences of two ONNX graphs: operators by output shape, inputs, outputs, and weights by shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from vlexport.errors import InputError, RequestError
from vlexport.onnx.header import check_model

if TYPE_CHECKING:
    import onnx

# Kind, name and shape; how many there are.
Parts = Counter[tuple[str, str, str]]


def parts_of(content: bytes, name: str) -> Parts:
    """Count the parts of a serialized model, bodies of loops and functions included; weights are not read."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        check_model(content)
        model = onnx.load_model_from_string(content)
    except (DecodeError, InputError) as error:
        raise RequestError(
            f"{name}: not an ONNX model that can be compared ({error}). Pass a .onnx file, or a bundle that "
            "holds one."
        ) from error
    graph, counts = model.graph, Parts()
    for kind, values in (("input", graph.input), ("output", graph.output)):
        counts.update((kind, value.name, _typed(value)) for value in values)
    functions = chain.from_iterable(function.node for function in model.functions)
    for body in chain([graph], _bodies(chain(graph.node, functions))):
        counts.update(
            ("weight", onnx.TensorProto.DataType.Name(tensor.data_type).lower(), str(list(tensor.dims)))
            for tensor in body.initializer
        )
        counts.update(
            _nodes(body.node, {value.name: _shape(value) for value in (*body.value_info, *body.output)})
        )
    for function in model.functions:
        counts.update(_nodes(function.node, {}))
    return counts


def num_nodes(parts: Parts) -> int:
    """Return the number of operators."""
    return sum(count for (kind, _, _), count in parts.items() if kind == "operator")


def differences(first: Parts, second: Parts) -> list[tuple[str, str, str, int, int]]:
    """Return kind, name, shape and both counts of every part whose counts differ."""
    rows = sorted(first.keys() | second.keys())
    return [(*row, first[row], second[row]) for row in rows if first[row] != second[row]]


def _bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of these nodes, and of the nodes in them."""
    waiting = [*nodes]
    while waiting:
        for attribute in waiting.pop().attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield body
                waiting += body.node


def _nodes(nodes: object, shapes: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for node in nodes:  # type: ignore[attr-defined]
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        yield "operator", name, ", ".join(shapes.get(output, "?") for output in node.output)


def _shape(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    sides = (
        side.dim_param or (side.dim_value if side.HasField("dim_value") else "?") for side in tensor.shape.dim
    )
    return f"[{', '.join(map(str, sides))}]"


def _typed(value: onnx.ValueInfoProto) -> str:
    import onnx

    return f"{onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()} {_shape(value)}"
