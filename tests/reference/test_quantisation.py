"""Products of integers in ONNX Runtime against the same written in numpy, for rows of any size."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from vlexport.onnx import quantize

ROWS, COLUMNS, OUTPUTS = 6, 8, 5
# Largest values of rows: below the smallest normal step of float32 (1.2e-38) a row counts as zeros.
SIZES = (1e4, 1.0, 1e-2, 1e-6, 1e-20, 1e-34)


def answer(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return what ONNX Runtime makes of one linear layer of a block, in integers."""
    float32 = ir.TensorType(ir.DataType.FLOAT)
    given = ir.Value(name="x", shape=ir.Shape(rows.shape), type=float32)
    stored = [
        ir.Value(
            name=name, const_value=ir.tensor(value, name=name), shape=ir.Shape(value.shape), type=float32
        )
        for name, value in (("blocks.0.weight", weight), ("blocks.0.bias", bias))
    ]
    node = ir.node("Gemm", [given, *stored], attributes={"transB": 1})
    made = node.outputs[0]
    made.name, made.shape, made.type = "y", ir.Shape([len(rows), len(weight)]), float32
    graph = ir.Graph([given], [made], nodes=[node], initializers=stored, opset_imports={"": 18})
    model = ir.Model(graph, ir_version=10)
    assert quantize.multiply(model) == ["blocks.0.weight"]
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    found: np.ndarray = session.run(None, {"x": rows})[0]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_size_keep_seven_bits_and_a_sign(size: float) -> None:
    random = np.random.default_rng(0)
    rows = random.uniform(-size, size, (ROWS, COLUMNS)).astype(np.float32)
    rows[-1] = 0
    weight = random.standard_normal((OUTPUTS, COLUMNS)).astype(np.float32)
    bias = (random.standard_normal(OUTPUTS) * size).astype(np.float32)
    wide, turned = rows.astype(np.float64), weight.astype(np.float64)
    step = np.abs(wide).max(axis=1, keepdims=True) / 127
    scale = np.abs(turned).max(axis=1) / 127
    counts = np.rint(wide / np.where(step > 0, step, 1))
    wanted = counts @ np.rint(turned / scale[:, None]).T * step * scale + bias
    # Float32 scales and adds after the sum of integers, which is exact: 4 roundings of 2**-24.
    error = np.abs(answer(rows, weight, bias) - wanted)
    assert error.max() <= 4 * 2.0**-24 * np.abs(wanted).max()
