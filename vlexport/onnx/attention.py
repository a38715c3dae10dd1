"""Attention over runs of equal segments in ONNX.

`vlexport::SegmentAttention` and `vlexport::SegmentCrossAttention` stand in the graph as functions of the
model. They loop over the runs, cut out `count x length` rows, attend without a mask and concatenate.
"""

# mypy: ignore-errors
# ruff: noqa: F821
# The bodies below are ONNX in Python's grammar: they are translated, never run, and their types are ONNX's.

from __future__ import annotations

import onnx_ir as ir
from onnx.defs import OpSchema
from onnxscript import FLOAT, INT32, script
from onnxscript import opset18 as op
from onnxscript.values import OnnxFunction, Op, Opset

DOMAIN = "vlexport"
CONTRIB = "com.microsoft"
OURS, THEIRS = Opset(DOMAIN, 1), Opset(CONTRIB, 1)
# Heads attended at once in float32, in frames of any length.
HEADS = 4
SWAP = [0, 2, 1, 3]
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]


def _operator(domain: Opset, name: str, *inputs: str) -> Op:
    schema = OpSchema(
        name,
        domain.domain,
        1,
        inputs=[
            OpSchema.FormalParameter(input_name, "I" if input_name == "runs" else "T")
            for input_name in inputs
        ],
        outputs=[OpSchema.FormalParameter("out", "T")],
        type_constraints=[("T", _FLOATS, ""), ("I", ["tensor(int32)", "tensor(int64)"], "")],
        attributes=[
            OpSchema.Attribute("scale", OpSchema.AttrType.FLOAT, ""),
            OpSchema.Attribute("num_heads", OpSchema.AttrType.INT, ""),
        ],
    )
    return Op(domain, name, schema)


SEGMENT_ATTENTION = _operator(OURS, "SegmentAttention", "q", "k", "v", "runs")
SEGMENT_CROSS_ATTENTION = _operator(OURS, "SegmentCrossAttention", "q", "k", "v", "runs")
_multi_head_attention = _operator(THEIRS, "MultiHeadAttention", "query", "key", "value")


@script(OURS, default_opset=op)
def onnxruntime(
    q: FLOAT["N", "H", "D"],
    k: FLOAT["N", "H", "D"],
    v: FLOAT["N", "H", "D"],
    runs: INT32["R", 2],
    scale: float,
    num_heads: int,
) -> FLOAT["N", "H", "D"]:
    """ONNX Runtime's fused attention, which is a flash kernel when it gets no mask and no bias."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    parts = op.SequenceEmpty(dtype=1)
    sizes = op.Cast(runs, to=7)
    counts = op.ReduceProd(sizes, one, keepdims=0)
    stops = op.CumSum(counts, op.Squeeze(zero))
    starts = stops - counts
    last = op.Constant(value_ints=[-1])
    rows = op.Concat(last, op.Shape(q, start=1, end=3), axis=0)
    num_runs = op.Squeeze(op.Shape(runs, start=0, end=1))
    for index in range(num_runs):
        at = op.Unsqueeze(index, zero)
        run = op.Squeeze(op.Gather(sizes, at, axis=0), zero)
        start = op.Gather(starts, at, axis=0)
        stop = op.Gather(stops, at, axis=0)
        shape = op.Concat(run, last, axis=0)
        query = op.Reshape(op.Slice(q, start, stop), shape)
        key = op.Reshape(op.Slice(k, start, stop), shape)
        value = op.Reshape(op.Slice(v, start, stop), shape)
        mixed = _multi_head_attention(query, key, value, num_heads=num_heads, scale=scale)
        parts = op.SequenceInsert(parts, op.Reshape(mixed, rows))
    return op.ConcatFromSequence(parts, axis=0)


@script(OURS, default_opset=op)
def cross_onnxruntime(
    q: FLOAT["P", "H", "D"],
    k: FLOAT["N", "H", "D"],
    v: FLOAT["N", "H", "D"],
    runs: INT32["R", 3],
    scale: float,
    num_heads: int,
) -> FLOAT["P", "H", "D"]:
    """ONNX Runtime's fused attention takes keys of another length than the queries."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    parts = op.SequenceEmpty(dtype=1)
    sizes = op.Cast(runs, to=7)
    counts = op.Gather(sizes, zero, axis=1)
    lengths = op.Slice(sizes, one, op.Constant(value_ints=[3]), one)
    stops = op.CumSum(counts * lengths, op.Squeeze(zero))
    starts = stops - counts * lengths
    last = op.Constant(value_ints=[-1])
    rows = op.Concat(last, op.Shape(q, start=1, end=3), axis=0)
    num_runs = op.Squeeze(op.Shape(runs, start=0, end=1))
    for index in range(num_runs):
        at = op.Unsqueeze(index, zero)
        count = op.Squeeze(op.Gather(counts, at, axis=0), zero)
        length = op.Squeeze(op.Gather(lengths, at, axis=0), zero)
        start = op.Squeeze(op.Gather(starts, at, axis=0), zero)
        stop = op.Squeeze(op.Gather(stops, at, axis=0), zero)
        query_shape = op.Concat(count, op.Gather(length, zero, axis=0), last, axis=0)
        key_shape = op.Concat(count, op.Gather(length, one, axis=0), last, axis=0)
        query_start, query_stop = op.Gather(start, zero, axis=0), op.Gather(stop, zero, axis=0)
        key_start, key_stop = op.Gather(start, one, axis=0), op.Gather(stop, one, axis=0)
        query = op.Reshape(op.Slice(q, query_start, query_stop), query_shape)
        key = op.Reshape(op.Slice(k, key_start, key_stop), key_shape)
        value = op.Reshape(op.Slice(v, key_start, key_stop), key_shape)
        mixed = _multi_head_attention(query, key, value, num_heads=num_heads, scale=scale)
        parts = op.SequenceInsert(parts, op.Reshape(mixed, rows))
    return op.ConcatFromSequence(parts, axis=0)


def dense(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_mask: ir.Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ir.Value:
    """Attend over [B, H, L, D] in standard operators; every query must see some key.

    In float32 a few heads at a time, where frames have any length: OpenVINO keeps what it took for an
    attention, 216 MiB for 16 heads of 16,384 patches, until the model is closed. In bfloat16 it keeps less,
    and groups would cost up to 4 % of a call.
    """
    assert (dropout_p, is_causal, enable_gqa) == (0.0, False, False), "no tower uses these"
    assert scale is not None, "towers give their scale"
    number = query.dtype
    bias = None
    if attn_mask is not None:
        seen = op.Constant(value=ir.tensor(0.0, dtype=number))
        hidden = op.Constant(value=ir.tensor(number.min, dtype=number))
        bias = op.Where(attn_mask, seen, hidden)
    _, heads, length, _ = query.shape
    factor = op.Constant(value=ir.tensor(scale, dtype=number))
    if number != ir.DataType.FLOAT or isinstance(length, int) or heads <= HEADS:
        return _attend(op.Mul(query, factor), key, value, bias)
    # Cut and joined outside the transposes, which OpenVINO then fuses: 1 to 2 % of a call.
    rows = [op.Transpose(tensor, perm=SWAP) for tensor in (query, key, value)]
    rows[0] = op.Mul(rows[0], factor)
    groups = zip(*(op.Split(tensor, axis=2, num_outputs=-(-heads // HEADS)) for tensor in rows), strict=True)
    mixed = [_attend(*(op.Transpose(tensor, perm=SWAP) for tensor in group), bias) for group in groups]
    return op.Transpose(op.Concat(*(op.Transpose(tensor, perm=SWAP) for tensor in mixed), axis=2), perm=SWAP)


def narrow(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_mask: ir.Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ir.Value:
    """Attend in bfloat16 over rows of float32."""
    assert scale is not None, "towers give their scale"
    # Scaled before they are rounded.
    scaled = op.Mul(query, op.Constant(value=ir.tensor(scale, dtype=query.dtype)))
    rounded = [op.Cast(rows, to=ir.DataType.BFLOAT16) for rows in (scaled, key, value)]
    for rows, wide in zip(rounded, (query, key, value), strict=True):
        # Translations read both.
        rows.dtype, rows.shape = ir.DataType.BFLOAT16, wide.shape
    return op.Cast(dense(*rounded, attn_mask, dropout_p, is_causal, 1.0, enable_gqa), to=query.dtype)


def _attend(query: ir.Value, key: ir.Value, value: ir.Value, bias: ir.Value | None) -> ir.Value:
    scores = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2]))
    scores = scores if bias is None else op.Add(scores, bias)
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def define_all(model: ir.Model) -> None:
    """Define the attention operators that the model uses."""
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    for name, body in (("SegmentAttention", onnxruntime), ("SegmentCrossAttention", cross_onnxruntime)):
        if name in used:
            define(model, name, body)


def define(model: ir.Model, name: str, body: OnnxFunction) -> None:
    """Make a body what nodes of this name in our domain mean."""
    proto = body.to_function_proto()
    proto.name = name
    function = ir.from_proto(proto)
    assert isinstance(function, ir.Function)
    rows = next(node.inputs[0] for node in model.graph if (node.domain, node.op_type) == (DOMAIN, name))
    for node in function.all_nodes():
        if node.op_type == "SequenceEmpty":
            node.attributes["dtype"] = ir.AttrInt64("dtype", int(rows.dtype))
    if any(node.domain == CONTRIB for node in function.all_nodes()):
        function.opset_imports[CONTRIB] = 1
        model.opset_imports[CONTRIB] = 1
    model.opset_imports[DOMAIN] = 1
    model.functions[function.identifier()] = function
