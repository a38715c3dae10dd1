"""Attention over runs in standard operators: what the kernel of ONNX Runtime is held to."""

# mypy: ignore-errors
# ruff: noqa: F821, UP037
# The body is ONNX in Python's grammar, which is translated and never run; types are ONNX's.

from __future__ import annotations

from onnxscript import FLOAT, INT32, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from vlexport.onnx.attention import DOMAIN


@script(Opset(DOMAIN, 1), default_opset=op)
def portable(
    q: FLOAT["N", "H", "D"],
    k: FLOAT["N", "H", "D"],
    v: FLOAT["N", "H", "D"],
    runs: INT32["R", 2],
    scale: float,
    num_heads: int,
) -> FLOAT["N", "H", "D"]:
    """Standard operators and plain tensors only: two matrix products around a softmax."""
    zero = op.Constant(value_ints=[0])
    sizes = op.Cast(runs, to=7)
    ends = op.CumSum(op.ReduceProd(sizes, op.Constant(value_ints=[1]), keepdims=0), op.Constant(value_int=0))
    last = op.Shape(q, start=1, end=3)
    rows = op.Concat(op.Constant(value_ints=[-1]), last, axis=0)
    out = op.Slice(q, zero, zero)
    num_runs = op.Squeeze(op.Shape(runs, start=0, end=1))
    for index in range(num_runs):
        run = op.Squeeze(op.Gather(sizes, op.Unsqueeze(index, zero), axis=0), zero)
        stop = op.Gather(ends, op.Unsqueeze(index, zero), axis=0)
        start = stop - op.ReduceProd(run, keepdims=1)
        shape = op.Concat(run, last, axis=0)
        query = op.Transpose(op.Reshape(op.Slice(q, start, stop, zero), shape), perm=[0, 2, 1, 3])
        key = op.Transpose(op.Reshape(op.Slice(k, start, stop, zero), shape), perm=[0, 2, 3, 1])
        value = op.Transpose(op.Reshape(op.Slice(v, start, stop, zero), shape), perm=[0, 2, 1, 3])
        weights = op.Softmax(op.MatMul(query * scale, key), axis=-1)
        mixed = op.Transpose(op.MatMul(weights, value), perm=[0, 2, 1, 3])
        out = op.Concat(out, op.Reshape(mixed, rows), axis=0)
    return out
