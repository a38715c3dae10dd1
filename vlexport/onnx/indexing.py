"""Translations of torch's operators on indices that its ONNX exporter lacks: flat tensors of integers."""

# mypy: ignore-errors
# ruff: noqa: A002
# Functions have the signatures of torch's operators; onnxscript's types are ONNX's.

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx import TensorProto
from onnxscript import opset18 as op

from vlexport.onnx.to_onnx import Translations

aten = torch.ops.aten
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
    """Count each index below `size`."""
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
    aten.repeat_interleave.Tensor: repeats,
    aten.repeat_interleave.self_Tensor: repeat_interleave,
    aten.bincount.default: bincount,
    aten.unique_consecutive.default: unique_consecutive,
    aten.argsort.stable: argsort,
    aten.unique_dim.default: unique_rows,
    aten.bucketize.Tensor: bucketize,
    aten.arange.start_step: steps,
}
