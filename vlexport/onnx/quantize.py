"""Linear layers of blocks in integers of 8 bits: stored as such, or multiplied as such too.

Weights get one scale for each output, so that rows of fused layers never share one. Where integers are
multiplied, what a layer takes is rounded with one scale for each row: a scale for the whole tensor costs a
third more accuracy. Products are summed in 32 bits, then scaled. Rows are unsigned, around 128, and so are
weights where the processor has no instructions for 8 bits: it multiplies a signed side by adding two products
in 16 bits, which saturate. Where it has them, signed weights take 0.6 of the time.
N rows, O outputs, C columns.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, type-arg, name-defined, valid-type, type-var"
# mypy: disable-error-code="operator, arg-type"
# ruff: noqa: F821
# The bodies below are ONNX in Python's grammar, which is translated and never run; types are ONNX's.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.defs import OpSchema
from onnx_ir.tape import Tape
from onnxscript import FLOAT, INT8, UINT8, script
from onnxscript import opset18 as op
from onnxscript.values import Op

from vlexport.errors import UnsupportedError
from vlexport.onnx.attention import CONTRIB, DOMAIN, OURS, THEIRS, define
from vlexport.onnx.passes import constant, is_product, take_over
from vlexport.specs import is_quantizable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

LARGEST: Final = 127
MIDDLE: Final = 128
# WORKAROUND(openvino 2026.4): it casts float32 to bfloat16 by cutting bits off, 0.28 % of a value on average.
# What 2^16 + 1 times a value loses to float32 are the bits that bfloat16 does not have.
SPLIT: Final = 2.0**16 + 1


_INPUTS = {"A": "uint8", "B": "T", "a_scale": "float", "b_scale": "float"}
_INPUTS |= {"a_zero_point": "uint8", "b_zero_point": "T"}
_product = Op(
    THEIRS,
    "MatMulIntegerToFloat",
    OpSchema(
        "MatMulIntegerToFloat",
        CONTRIB,
        1,
        inputs=[
            OpSchema.FormalParameter(name, kind if kind == "T" else f"tensor({kind})")
            for name, kind in _INPUTS.items()
        ],
        outputs=[OpSchema.FormalParameter("Y", "tensor(float)")],
        type_constraints=[("T", ["tensor(int8)", "tensor(uint8)"], "")],
    ),
)


@script(OURS, default_opset=op)
def rounded_rows(x: FLOAT["N", "C"]):
    """Return every row as 128 + steps of its own size, the largest value being 127 of them."""
    largest = op.ReduceMax(op.Abs(x), op.Constant(value_ints=[-1]), keepdims=1)
    # A row of zeros is zero steps of any size but zero.
    step = op.Max(largest / op.Constant(value_float=127.0), op.Constant(value_float=1e-37))
    one = op.Constant(value_float=1.0)
    middle = op.Cast(op.Constant(value_int=128), to=2)
    return op.QuantizeLinear(x / step, one, middle), step


@script(OURS, default_opset=op)
def integer_linear(
    rows: UINT8["N", "C"],
    step: FLOAT["N", 1],
    weight: INT8["C", "O"],
    scale: FLOAT["O"],
    bias: FLOAT["O"],
    zero: int,
):
    """Multiply in integers; the sizes of steps of both sides, then the bias. A weight of `zero` is 0."""
    one = op.Constant(value_float=1.0)
    middle = op.Cast(op.Constant(value_int=128), to=2)
    zeros = op.CastLike(op.Constant(value_int=zero), weight)
    return _product(rows, weight, one, scale, middle, zeros) * step + bias


def multiply(model: ir.Model, *, signed: bool) -> list[str]:
    """Turn linear layers of blocks into products of integers; return the names of the weights."""
    layers = list(_layers(model.graph))
    rounded: dict[ir.Value, ir.Node] = {}
    for node, name in layers:
        x, weight, *biases = node.inputs
        assert x is not None
        if x not in rounded:
            rounded[x] = ir.node("RoundedRows", [x], domain=DOMAIN, num_outputs=2)
            model.graph.insert_before(node, rounded[x])
        integers_CO, scale_O = _stored(model.graph, weight, turned=True, signed=signed)
        bias = biases[0] if biases else constant(model.graph, f"{name}.bias", _zeros(scale_O))
        inputs = [*rounded[x].outputs, integers_CO, scale_O, bias]
        product = ir.node("IntegerLinear", inputs, {"zero": 0 if signed else MIDDLE}, domain=DOMAIN)
        model.graph.insert_before(node, product)
        take_over(model.graph, node, product)
    if layers:
        define(model, "RoundedRows", rounded_rows)
        define(model, "IntegerLinear", integer_linear)
    return [name for _, name in layers]


def store(model: ir.Model) -> list[str]:
    """Store the weights of these layers as integers that are scaled before use; return their names."""
    layers = list(_layers(model.graph))
    for node, _ in layers:
        integers_OC, scale_O = _stored(model.graph, node.inputs[1], turned=False, signed=True)
        scaled = ir.node("DequantizeLinear", [integers_OC, scale_O], attributes={"axis": 0})
        model.graph.insert_before(node, scaled)
        node.replace_input_with(1, scaled.outputs[0])
    return [name for _, name in layers]


def narrow_rest(model: ir.Model) -> None:
    """Multiply in bfloat16 where no layer of integers takes the result, and round what is cast to it."""
    waiting = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    waiting = [use.node for node in waiting for use in node.outputs[0].uses()]
    earlier: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in earlier:
            earlier.add(node)
            waiting += [source for value in node.inputs if value and (source := value.producer())]
    for node in [node for node in model.graph if is_product(node) and node not in earlier]:
        rows, *weights = node.inputs
        # Of a stack of several layers a weight is cut out while the graph runs.
        if not all(weight and weight.const_value for weight in weights):
            continue
        tape = Tape()
        taken = [tape.op("Cast", [rows], {"to": ir.DataType.BFLOAT16})]
        taken += [_narrowed(model.graph, weight) for weight in weights]
        wide = tape.op("Cast", [tape.op("Gemm", taken, node.attributes)], {"to": ir.DataType.FLOAT})
        model.graph.insert_before(node, tape.nodes)
        take_over(model.graph, node, wide.producer())
    _round_casts(model.graph)


def _round_casts(graph: ir.Graph) -> None:
    split = constant(graph, "split", np.array(SPLIT, np.float32))
    for cast in list(graph):
        if cast.op_type == "Cast" and cast.attributes.get_int("to") == ir.DataType.BFLOAT16:
            rows, tape = cast.inputs[0], Tape()
            large = tape.op("Mul", [rows, split])
            nearest = tape.op("Sub", [large, tape.op("Sub", [large, rows])])
            graph.insert_before(cast, tape.nodes)
            cast.replace_input_with(0, nearest)


def check_complete(stored: list[str], weights: Mapping[str, Tensor]) -> None:
    """Refuse a tower some of whose matrices stayed floating point: what is promised is not there."""
    missing = sorted(
        {name for name, weight in weights.items() if is_quantizable(name, weight.ndim)} - set(stored)
    )
    if missing:
        raise UnsupportedError(
            f"{len(missing)} matrices of blocks are no plain linear layers in the graph and cannot become "
            f"integers, the first is {missing[0]}. Build without quantize."
        )


def read_weights(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the weights that results depend on; a class may have layers whose results it does not take."""
    waiting = [node for node in program.graph.nodes if node.op == "output"]
    read = set(waiting)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - read
        read |= new
        waiting += new
    places, names = {node.name for node in read}, program.graph_signature.inputs_to_parameters
    return {name: program.state_dict[name] for place, name in names.items() if place in places}


def _layers(graph: ir.Graph) -> Iterator[tuple[ir.Node, str]]:
    for node in filter(is_product, graph):
        weight = node.inputs[1]
        name = weight.name or "" if weight is not None else ""
        if name in graph.initializers and is_quantizable(name, 2):
            yield node, name


def _stored(
    graph: ir.Graph, weight: ir.Value | None, *, turned: bool, signed: bool
) -> tuple[ir.Value, ir.Value]:
    assert weight is not None
    assert weight.const_value is not None
    integers_OC, scale_O = integers_of(weight.const_value.numpy())
    content = np.ascontiguousarray(integers_OC.T) if turned else integers_OC
    # The first bit is the other one where 128 is added.
    content = content if signed else content.view(np.uint8) ^ MIDDLE
    return constant(graph, f"{weight.name}.int8", content), constant(graph, f"{weight.name}.scale", scale_O)


def _narrowed(graph: ir.Graph, weight: ir.Value | None) -> ir.Value:
    assert weight is not None
    assert weight.const_value is not None
    return constant(graph, f"{weight.name}", weight.const_value.numpy().astype(ir.DataType.BFLOAT16.numpy()))


def _zeros(scale_O: ir.Value) -> npt.NDArray[np.float32]:
    assert scale_O.const_value is not None
    return np.zeros_like(scale_O.const_value.numpy())


def integers_of(
    weight_OC: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Return `scale * integers`, one scale for each output, none above 127; a row of zeros has scale 0."""
    scale_O = np.abs(weight_OC).max(axis=1) / np.float32(LARGEST)
    steps_OC = weight_OC / np.where(scale_O > 0, scale_O, np.float32(1))[:, None]
    return np.rint(steps_OC).astype(np.int8), scale_O.astype(np.float32)
