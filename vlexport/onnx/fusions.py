"""Named rewrites of chains of elementwise operators into those that a runtime has kernels for.

Each rewrite is exact up to rounding; the tests run a model before and after every one. A rewrite that
finds nothing to do returns 0, and the backend decides whether that is an error.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Pattern functions take symbolic values whose types onnxscript does not publish.

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase, RewriteRuleSet

from vlexport.onnx import attention
from vlexport.onnx.passes import constant_of


class _RootMeanSquareNorm(RewriteRuleClassBase):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis."""

    def pattern(self, op, x, weight, eps):
        mean = op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1, noop_with_empty_axes=0)
        return op.Mul(weight, op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, eps)))))

    def check(self, op, x, weight, eps, **_):
        match = MatchResult()
        if _scalar(eps) is None:
            match.fail("epsilon is not a constant")
        if weight.shape is None or len(weight.shape) != 1:
            match.fail("weight is not a vector")
        return match

    def rewrite(self, op, x, weight, eps, **_):
        # ONNX Runtime registers this operator in the standard domain.
        return op.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=_scalar(eps), stash_type=1)


class _GatedUnit(RewriteRuleClassBase):
    """`gate * sigmoid(gate) * up`."""

    def pattern(self, op, gate, up):
        return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)

    def rewrite(self, op, gate, up, **_):
        return op.Mul(op.QuickGelu(gate, alpha=1.0, _domain=attention.CONTRIB, _version=1), up)


class _RotaryHalves(RewriteRuleClassBase):
    """The pairs (first half, second half) of each head turned by per-row tables."""

    def pattern(self, op, x, cos, sin):
        first, second = op.Split(x, axis=2, num_outputs=2, _outputs=["first", "second"])
        turned = op.Sub(op.Mul(first, cos), op.Mul(second, sin))
        other = op.Add(op.Mul(second, cos), op.Mul(first, sin))
        return op.Concat(turned, other, axis=-1)

    def check(self, op, x, cos, sin, **_):
        match, tables = MatchResult(), [cos.producer(), sin.producer()]
        if any(node is None or node.op_type != "Unsqueeze" for node in tables):
            match.fail("the tables are not one row per token, shared by the heads")
        if x.shape is None or len(x.shape) != 3:
            match.fail("x is not [rows, heads, width]")
        return match

    def rewrite(self, op, x, cos, sin, **_):
        return _turned(op, x, cos.producer().inputs[0], sin.producer().inputs[0])


class _RotaryWhole(_RotaryHalves):
    """The same to the form that OpenVINO has a kernel for: `x * cos + (-second, first) * sin`."""

    def rewrite(self, op, x, cos, sin, **_):
        half = x.shape[2] // 2
        first, second = op.Split(x, op.Constant(value_ints=[half, half]), axis=2, _outputs=2)
        turned = op.Concat(op.Neg(second), first, axis=-1)
        wide_cos, wide_sin = (op.Concat(table, table, axis=-1) for table in (cos, sin))
        return op.Add(op.Mul(x, wide_cos), op.Mul(turned, wide_sin))


class _RotaryHalfTurned(RewriteRuleClassBase):
    """The same as `x * cos + (-second, first) * sin`, where each table has its half twice."""

    def pattern(self, op, x, cos, sin, begin, half, end, axis, step):
        first = op.Slice(x, begin, half, axis, step)
        second = op.Slice(x, half, end, axis, step)
        return op.Add(op.Mul(x, cos), op.Mul(op.Concat(op.Neg(second), first, axis=-1), sin))

    def check(self, op, x, cos, sin, begin, half, end, axis, step, **_):
        match = MatchResult()
        if x.shape is None or len(x.shape) != 3 or not isinstance(width := x.shape[2], int):
            match.fail("x is not [rows, heads, width]")
        elif [*map(_scalar, (begin, half, axis, step))] != [0, width / 2, 2, 1] or (
            _scalar(end) or 0
        ) < width:
            match.fail("x is not cut in the middle")
        elif not all(_is_doubled(table, width) for table in (cos, sin)):
            match.fail("the tables are not one row per token whose halves are equal")
        return match

    def rewrite(self, op, x, cos, sin, begin, half, step, **_):
        last = op.Constant(value_ints=[1])
        tables = (op.Slice(table.producer().inputs[0], begin, half, last, step) for table in (cos, sin))
        return _turned(op, x, *tables)


def _turned(op, x, cos, sin):
    _, heads, width = x.shape
    rows = op.Reshape(x, op.Constant(value_ints=[1, -1, heads * width]))
    inputs = (rows, op.Constant(value_ints=[0]), cos, sin)
    turned = op.RotaryEmbedding(*inputs, interleaved=0, _domain=attention.CONTRIB, _version=1)
    return op.Reshape(turned, op.Constant(value_ints=[-1, heads, width]))


def _is_doubled(table: ir.Value, width: int) -> bool:
    """Return whether a table [N, 1, width] is made of rows whose second half repeats the first."""
    node = table.producer()
    if node is None or node.op_type != "Unsqueeze":
        return False
    # What takes rows as they are, or each number by itself.
    while node is not None and node.op_type in ("Unsqueeze", "Reshape", "GatherND", "Cos", "Sin"):
        value = node.inputs[0]
        if value is None or value.shape is None or value.shape[-1] != width:
            return False
        node = value.producer()
    if node is None or node.op_type != "Concat" or node.attributes["axis"].as_int() != -1:
        return False
    first, *others = node.inputs
    return [*others] == [first]


def _scalar(value: ir.Value) -> float | None:
    constant = constant_of(value)
    return float(constant.numpy().item()) if constant is not None and constant.size == 1 else None


FUSIONS: Final[Mapping[str, type[RewriteRuleClassBase]]] = {
    "norm": _RootMeanSquareNorm,
    "gated_unit": _GatedUnit,
    "rotary": _RotaryHalves,
    "rotary_whole": _RotaryWhole,
    "rotary_turned": _RotaryHalfTurned,
}


def fuse(model: ir.Model, name: str) -> int:
    """Apply one rewrite everywhere; return how many places it changed."""
    # A rule keeps the model that it was tried on.
    count: int = RewriteRuleSet([FUSIONS[name].rule()]).apply_to_model(model)
    if count:
        model.opset_imports.setdefault(attention.CONTRIB, 1)
    return count
