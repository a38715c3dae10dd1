"""Weights as integers: the nearest ones, in every layer of every block, or a refusal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from tests.onnx.conftest import DEPTH, translated
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport._build.export import export
from vlexport.backends._engine import has_vnni
from vlexport.backends._integers import IntegerLinear
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.onnx import quantize
from vlexport.parity.noise import on_grid
from vlexport.recipe import recipe_for


def test_integers_are_the_nearest_ones_by_another_definition() -> None:
    for seed in range(5):
        weight = np.random.default_rng(seed).standard_normal((37, 61)).astype(np.float32) * 10.0 ** (seed - 3)
        steps, scale = quantize.integers_of(weight)
        assert abs(steps.astype(int)).max(axis=1).tolist() == [127] * 37
        expected = on_grid(torch.from_numpy(weight), 0).numpy()
        np.testing.assert_allclose(steps * scale[:, None], expected, rtol=1e-6)
        assert (abs(steps * scale[:, None] - weight) <= 0.501 * scale[:, None]).all()


def test_a_row_of_zeros_stays_one_and_disturbs_no_other() -> None:
    weight = np.array([[0.0, 0.0], [1.0, -0.5]], dtype=np.float32)
    steps, scale = quantize.integers_of(weight)
    assert steps.tolist() == [[0, 0], [127, -64]]
    assert scale[0] == 0


@pytest.mark.seconds
def test_every_matrix_of_every_block_becomes_integers_and_nothing_else_does(graph, model) -> None:
    weights = dict(graph.program.state_dict)
    plain = Counter(node.op_type for node in model.graph)["Gemm"]
    found = quantize.multiply(model, signed=False)
    counts = Counter(node.op_type for node in model.graph)
    assert set(found) == {name for name, each in weights.items() if "blocks." in name and each.ndim == 2}
    # Queries, keys and values are one layer; gate and up take the same rows.
    assert counts["IntegerLinear"] == len(found) == 5 * DEPTH
    assert counts["RoundedRows"] == 4 * DEPTH
    assert counts["Gemm"] == plain - len(found)
    quantize.check_complete(found, weights)


@pytest.mark.slow
def test_split_projections_share_one_rounding(tmp_path: Path) -> None:
    source = Checkpoint.open(write_tiny_minicpmv(tmp_path / "tower", Tiny(version="2.6")))
    graph = export(recipe_for(source), source)
    model, weights = translated(graph), dict(graph.program.state_dict)
    found = quantize.multiply(model, signed=False)
    counts = Counter(node.op_type for node in model.graph)
    assert counts["IntegerLinear"] == len(found)
    assert counts["RoundedRows"] == len(found) // 6 * 4
    quantize.check_complete(found, weights)


def test_stored_integers_are_scaled_before_a_plain_product(model) -> None:
    plain = Counter(node.op_type for node in model.graph)["Gemm"]
    found = quantize.store(model)
    counts = Counter(node.op_type for node in model.graph)
    assert (counts["Gemm"], counts["DequantizeLinear"]) == (plain, len(found))


def test_behind_the_integers_products_are_narrow_with_the_nearest_weights(graph, model) -> None:
    quantize.store(model)
    quantize.narrow_rest(model)
    narrow = {
        name: torch.from_numpy(each.const_value.numpy().astype(np.float32))
        for name, each in model.graph.initializers.items()
        if each.dtype == ir.DataType.BFLOAT16
    }
    # What embeds patches comes before them.
    assert set(narrow) == {f"merger.mlp.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}
    for name, rows in narrow.items():
        assert torch.equal(rows, graph.program.state_dict[name].bfloat16().float())
    read = [node.inputs[0].producer() for node in model.graph if node.op_type == "Gemm"]
    assert sum(node is not None and node.op_type == "Cast" for node in read) == 2


CAST = """
<ir_version: 10, opset_import: ["": 18]>
cast (float[1005] x) => (float[1005] out) {
    narrow = Cast <to = 16> (x)
    out = Cast <to = 1> (narrow)
}
"""


def test_what_is_cast_to_bfloat16_is_torchs_nearest_of_any_size_and_between_two() -> None:
    """OpenVINO cuts bits off: what it casts must have none to lose."""
    model = ir.from_onnx_text(CAST)
    quantize.narrow_rest(model)
    (narrow,) = [node for node in model.graph if node.attributes.get_int("to", 0) == ir.DataType.BFLOAT16]
    assert narrow.inputs[0] is not None
    model.graph.outputs[0] = narrow.inputs[0]
    narrow.inputs[0].name, narrow.inputs[0].type = "rounded", model.graph.inputs[0].type
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-20, 20, (1000,), generator=generator)
    between = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0, 257])
    rows = torch.cat([torch.randn(1000, generator=generator) * sizes, between])
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    (rounded,) = session.run(None, {"x": rows.numpy()})
    assert torch.equal(torch.from_numpy(rounded), rows.bfloat16().float())


def test_a_matrix_that_stays_floating_point_is_refused_by_name() -> None:
    weights = {"blocks.0.mlp.weight": torch.zeros(2, 2), "blocks.1.mlp.weight": torch.zeros(2, 2)}
    with pytest.raises(UnsupportedError, match=r"1 matrices .* the first is blocks\.1\.mlp\.weight"):
        quantize.check_complete(["blocks.0.mlp.weight"], weights)


ROWS, COLUMNS, OUTPUTS = 6, 8, 5
# Largest values of rows: below the smallest normal step of float32 (1.2e-38) a row counts as zeros.
SIZES = (1e4, 1.0, 1e-2, 1e-6, 1e-20, 1e-34)


def integers_of(
    rows: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, signed: bool = False
) -> np.ndarray:
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
    assert quantize.multiply(model, signed=signed) == ["blocks.0.weight"]
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    found: np.ndarray = session.run(None, {"x": rows})[0]
    return found


SIGNED = pytest.param(True, marks=pytest.mark.skipif(not has_vnni(), reason="no VNNI: sums saturate"))


@pytest.mark.parametrize("signed", [False, SIGNED])
def test_sums_of_the_largest_products_do_not_saturate(signed: bool) -> None:
    """Two signed products of 8 bits, added in 16 without the instructions for it, end at 32,767."""
    rows, weight = np.ones((70, 61), np.float32), np.ones((37, 61), np.float32)
    sums = integers_of(rows, weight, np.zeros(37, np.float32), signed=signed)
    np.testing.assert_allclose(sums, 61, rtol=1e-6)


@pytest.mark.parametrize("signed", [False, SIGNED])
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_size_keep_seven_bits_and_a_sign(size: float, signed: bool) -> None:
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
    error = np.abs(integers_of(rows, weight, bias, signed=signed) - wanted)
    assert error.max() <= 4 * 2.0**-24 * np.abs(wanted).max()


@pytest.mark.skipif(not has_vnni(), reason="no VNNI: sums saturate")
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_in_torch_is_the_same(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(COLUMNS, OUTPUTS)
    rows = torch.randn(ROWS, 2, COLUMNS, generator=generator) * size
    with torch.no_grad():
        layer.bias.mul_(size)
        found = IntegerLinear(layer, layer.weight)(rows)
        grid = on_grid(rows.double(), 0), on_grid(layer.weight.double(), 0), layer.bias.double()
        wanted = nn.functional.linear(*grid)
    # Float32 scales and adds after the sum of integers, which is exact: 4 roundings of 2**-24.
    assert (found - wanted).abs().max() <= 4 * 2.0**-24 * wanted.abs().max()
