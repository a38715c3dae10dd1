"""Passes over an ONNX model for runtimes that plan memory from shapes: constant shapes, narrow layers.

OpenVINO plans memory before it knows sizes, so a buffer grows to the widest value that ever uses it: one
product for queries, keys and values, or the hidden layer of an MLP, then widens many. The cuts change no
product and no order of sums but for the last layer of an MLP, whose parts are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

ELEMENTWISE: Final = frozenset({"Mul", "Add", "Sub", "Div", "Pow", "Sigmoid", "Erf", "Tanh", "Gelu"})
# Kernels for products want widths of whole vectors.
STEP: Final = 32


def drop_unused(model: ir.Model) -> None:
    """Drop unused nodes, initializers and functions."""
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]


def store_as_taken(model: ir.Model) -> int:
    """Store weights in the shapes and parts that the graph takes; return how many it had reshaped or split.

    ONNX Runtime, which is not asked to fold constants, arranges only stored weights for its products. Of the
    others it adds up in steps that depend on rows and on how threads share them, so on the rest of the call.
    """
    count = 0
    for node in list(model.graph):
        weight = node.inputs[0] if node.op_type in ("Reshape", "Split") else None
        if weight is None or not weight.is_initializer() or weight.const_value is None:
            continue
        content, sizes = weight.const_value.numpy(), [constant_of(value) for value in node.inputs[1:]]
        if None in sizes:
            continue
        chosen = [size.numpy() for size in sizes if size is not None]
        if node.op_type == "Reshape":
            parts = [content.reshape(chosen[0])]
        else:
            cuts = np.cumsum(chosen[0])[:-1] if chosen else len(node.outputs)
            parts = np.split(content, cuts, node.attributes.get_int("axis", 0))
        for number, (taken, part) in enumerate(zip(node.outputs, parts, strict=True)):
            name = f"{weight.name}.part{number}"
            taken.replace_all_uses_with(constant(model.graph, name, np.ascontiguousarray(part)))
        model.graph.remove(node, safe=True)
        count += 1
    return count


def save(model: ir.Model, path: Path, weights: str) -> None:
    """Write a model and a file of its weights next to it, and let go of them.

    Patterns of the exporter's optimiser keep the last node that they were tried on, and with it the graph.
    """
    # ONNX Runtime reads the sizes of a split while it infers shapes, and finds them in no other file.
    cuts = (
        constant_of(value) for node in model.graph if node.op_type == "Split" for value in node.inputs[1:]
    )
    inside = max([1024, *(sizes.nbytes + 1 for sizes in cuts if sizes is not None)])
    ir.save(model, path, external_data=weights, size_threshold_bytes=inside)
    for value in model.graph.initializers.values():
        value.const_value = None


def settle_shapes(model: ir.Model) -> int:
    """Give reshapes constant shapes where their sizes stay; return how many.

    A reshape may keep one size (0) or all but one (-1) without anybody computing it. A runtime that plans its
    memory from shapes, as OpenVINO does, can then plan over the whole graph.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type == "Reshape" and constant_of(node.inputs[1]) is None:
            sizes = _constant_sizes(node.inputs[0], node.outputs[0])
            if sizes is not None:
                shape = _integers(sizes)
                model.graph.insert_before(node, shape)
                node.replace_input_with(1, shape.outputs[0])
                # With this attribute a 0 is a size of zero.
                node.attributes.pop("allowzero", None)
                count += 1
    return count


def _constant_sizes(source: ir.Value | None, target: ir.Value) -> list[int] | None:
    """Return the new shape with 0 for sizes that stay where they are and at most one -1."""
    if source is None or source.shape is None or target.shape is None:
        return None
    sizes = [
        size
        if isinstance(size, int)
        else 0
        if axis < len(source.shape) and source.shape[axis] == size
        else -1
        for axis, size in enumerate(target.shape)
    ]
    return sizes if sizes.count(-1) <= 1 else None


def _integers(values: list[int]) -> ir.Node:
    return ir.node("Constant", [], attributes={"value_ints": values})


class Linear(NamedTuple):
    """`x @ weight.T + bias` of constants."""

    node: ir.Node
    weight_OC: npt.NDArray[np.generic]
    bias_O: npt.NDArray[np.generic]


def split_projections(model: ir.Model) -> int:
    """Give results that are cut out of one product a product each; how many products were cut."""
    count = 0
    for node in list(model.graph):
        linear = _linear(node)
        if linear is not None and (cuts := _cuts(linear)) is not None:
            for index, cut in enumerate(cuts):
                _cut_out(model.graph, linear, cut, index, len(cuts))
            count += 1
    return count


def is_product(node: ir.Node) -> bool:
    """Return whether a node computes `x @ weight.T`, with a bias or without."""
    if node.op_type != "Gemm":
        return False
    plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    return plain and [node.attributes.get_int(name, 0) for name in ("transA", "transB")] == [0, 1]


def _linear(node: ir.Node | None) -> Linear | None:
    if node is None or len(node.inputs) != 3 or not is_product(node):
        return None
    weight, bias = (constant_of(value) for value in node.inputs[1:])
    return None if weight is None or bias is None else Linear(node, weight.numpy(), bias.numpy())


def _cuts(linear: Linear) -> list[ir.Node] | None:
    """Return the nodes that take one row each of axis 1 of the product, reshaped; in order, all of them."""
    readers = [use.node for use in linear.node.outputs[0].uses()]
    if len(readers) != 1 or readers[0].op_type != "Reshape":
        return None
    reshaped = readers[0].outputs[0]
    shape = reshaped.shape
    parts = shape[1] if shape is not None and len(shape) > 1 else None
    cuts = {_row_taken(use.node): use.node for use in reshaped.uses()}
    if not isinstance(parts, int) or set(cuts) != set(range(parts)):
        return None
    return [cuts[index] for index in range(parts)]


def _row_taken(node: ir.Node) -> int | None:
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return None
    constants = [constant_of(value) for value in node.inputs[1:4]]
    if any(bound is None or bound.size != 1 for bound in constants):
        return None
    start, stop, axis = (int(bound.numpy().item()) for bound in constants if bound is not None)
    return start if axis == 1 and stop == start + 1 else None


def _cut_out(graph: ir.Graph, linear: Linear, cut: ir.Node, index: int, parts: int) -> None:
    shape = cut.outputs[0].shape
    assert shape is not None
    fixed = [size for size in shape[1:] if isinstance(size, int)]
    assert len(fixed) == len(shape) - 1, f"only rows vary, not {shape}"
    width = len(linear.weight_OC) // parts
    rows = slice(index * width, (index + 1) * width)
    constants = (linear.weight_OC[rows], linear.bias_O[rows])
    product = _product(graph, linear.node, linear.node.inputs[0], constants, f"part{index}")
    sizes = _integers([-1, *fixed])
    reshaped = ir.node("Reshape", [product.outputs[0], sizes.outputs[0]])
    graph.insert_before(cut, [product, sizes, reshaped])
    take_over(graph, cut, reshaped)


def split_hidden(model: ir.Model) -> int:
    """Cut hidden layers that are wider than what goes into them; return how many were cut."""
    count = 0
    for node in list(model.graph):
        last = _linear(node)
        if last is not None and (hidden := _hidden(last)) is not None and hidden.parts > 1:
            _split_one(model.graph, last, hidden)
            count += 1
    return count


class Hidden(NamedTuple):
    """Linear layers of one input, and the elementwise nodes that make the next layer's input of them."""

    sources: Sequence[Linear]
    nodes: Sequence[ir.Node]

    @property
    def parts(self) -> int:
        inner, width = (int(size) for size in self.sources[0].weight_OC.shape)
        return -(-inner // width)

    def pieces(self) -> list[slice]:
        inner = len(self.sources[0].weight_OC)
        step = -(-inner // self.parts // STEP) * STEP
        return [slice(start, min(start + step, inner)) for start in range(0, inner, step)]


def _hidden(last: Linear) -> Hidden | None:
    """Return what is between a layer and those before it, if it is elementwise and has no other reader."""
    sources: dict[ir.Node, Linear] = {}
    nodes: list[ir.Node] = []
    waiting = [last.node.inputs[0]]
    while waiting:
        value = waiting.pop()
        if constant_of(value) is not None:
            continue
        node = None if value is None else value.producer()
        linear = _linear(node)
        if node is None or (linear is None and node.op_type not in ELEMENTWISE):
            return None
        if linear is not None:
            sources[node] = linear
        elif node not in nodes:
            nodes.append(node)
            waiting += node.inputs
    inside = {last.node, *nodes}
    values = [node.outputs[0] for node in (*nodes, *sources)]
    private = all(use.node in inside for value in values for use in value.uses())
    private = private and not any(value.is_graph_output() for value in values)
    constants = [constant_of(value) for node in nodes for value in node.inputs]
    # The same for every column.
    scalars = all(constant is None or constant.size == 1 for constant in constants)
    alike = {(source.node.inputs[0], source.weight_OC.shape) for source in sources.values()}
    if not (nodes and private and scalars and len(alike) == 1):
        return None
    assert last.node.graph is not None
    return Hidden(list(sources.values()), [node for node in last.node.graph if node in nodes])


def constant_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of a value that is a constant."""
    return None if value is None else ir.convenience.get_const_tensor(value)


def _split_one(graph: ir.Graph, last: Linear, hidden: Hidden) -> None:
    total: ir.Node | None = None
    for index, piece in enumerate(hidden.pieces()):
        parts: dict[ir.Value, ir.Value] = {}
        copies: list[ir.Node] = []
        for source in hidden.sources:
            rows = (source.weight_OC[piece], source.bias_O[piece])
            copies.append(_product(graph, source.node, source.node.inputs[0], rows, f"part{index}"))
            parts[source.node.outputs[0]] = copies[-1].outputs[0]
        for node in hidden.nodes:
            inputs = [value if value is None else parts.get(value, value) for value in node.inputs]
            attributes = tuple(node.attributes.values())
            copies.append(ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=1))
            parts[node.outputs[0]] = copies[-1].outputs[0]
        # The bias is added once.
        columns = (last.weight_OC[:, piece], None if index else last.bias_O)
        copies.append(_product(graph, last.node, copies[-1].outputs[0], columns, f"part{index}"))
        if total is not None:
            copies.append(ir.node("Add", [total.outputs[0], copies[-1].outputs[0]]))
        total = copies[-1]
        graph.insert_before(last.node, copies)
    assert total is not None
    take_over(graph, last.node, total)


def _product(
    graph: ir.Graph,
    like: ir.Node,
    x: ir.Value | None,
    constants: tuple[npt.NDArray[np.generic], npt.NDArray[np.generic] | None],
    name: str,
) -> ir.Node:
    inputs = [x]
    for old, content in zip(like.inputs[1:], constants, strict=True):
        assert old is not None
        if content is not None:
            inputs.append(constant(graph, f"{old.name}.{name}", content))
    return ir.node("Gemm", inputs, attributes={"transB": 1})


def constant(graph: ir.Graph, name: str, content: npt.NDArray[np.generic]) -> ir.Value:
    """Add an initializer."""
    tensor = ir.tensor(content, name=name)
    shape, kind = ir.Shape(content.shape), ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, const_value=tensor, shape=shape, type=kind)
    graph.initializers[name] = value
    return value


def take_over(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    """Connect the readers of the old node's result to the new one's, under the same name."""
    before, taken = old.outputs[0], new.outputs[0]
    taken.name, taken.shape, taken.type = before.name, before.shape, before.type
    ir.convenience.replace_all_uses_with(before, taken, replace_graph_outputs=True)
    graph.remove(old, safe=True)
