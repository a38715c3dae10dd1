"""Shapes that a graph computes from its inputs' sizes, written down as constants where ONNX can hold them.

A reshape may keep one size (0) or all but one (-1) without anybody computing it. A runtime that plans its
memory from shapes, as OpenVINO does, can then plan over the whole graph.
"""

from __future__ import annotations

import onnx_ir as ir


def settle(model: ir.Model) -> int:
    """Give reshapes constant shapes; how many had computed ones and have not now."""
    count = 0
    for node in list(model.graph):
        if node.op_type == "Reshape" and _is_computed(node.inputs[1]):
            sizes = _constant_sizes(node.inputs[0], node.outputs[0])
            if sizes is not None:
                _set_shape(node, sizes)
                count += 1
    return count


def _is_computed(value: ir.Value | None) -> bool:
    assert value is not None
    return ir.convenience.get_const_tensor(value) is None


def _constant_sizes(given: ir.Value | None, wanted: ir.Value) -> list[int] | None:
    """Return the new shape with 0 for sizes that stay where they are and at most one -1."""
    if given is None or given.shape is None or wanted.shape is None:
        return None
    sizes = [
        size if isinstance(size, int) else 0 if axis < len(given.shape) and given.shape[axis] == size else -1
        for axis, size in enumerate(wanted.shape)
    ]
    return sizes if sizes.count(-1) <= 1 else None


def _set_shape(node: ir.Node, sizes: list[int]) -> None:
    constant = ir.node("Constant", [], attributes={"value_ints": sizes})
    assert node.graph is not None
    node.graph.insert_before(node, constant)
    node.replace_input_with(1, constant.outputs[0])
    # With this attribute a 0 is a size of zero.
    node.attributes.pop("allowzero", None)
