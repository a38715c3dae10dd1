"""What OpenVINO's graph goes through: plain attention, constant shapes, narrow layers; the same results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from tests.onnx.conftest import DEPTH, run, translated
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport._build.export import export
from vlexport._build.graph import Graph
from vlexport.checkpoint import Checkpoint
from vlexport.onnx import passes
from vlexport.recipe import find_recipe

# Sums in another order: 1.1e-6 measured on outputs of size 1.
ROUNDING = 5e-6


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def form() -> str:
    return "padded"


def fixed(shape: ir.Shape | None) -> list[int]:
    return [size for size in shape or () if isinstance(size, int)]


def counts(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


def test_unguarded_attention_compares_nothing_with_nan(graph, model, inputs):
    guarded = translated(graph)
    # A windowed block calls attention once, a full one for each of three shelves.
    assert counts(guarded)["IsNaN"] == counts(model)["Softmax"] >= DEPTH
    assert counts(model)["IsNaN"] == 0
    assert not model.functions, "OpenVINO knows none of ours"
    expected = graph.program.module()(inputs)["embeds"]
    torch.testing.assert_close(run(model, inputs), expected, atol=ROUNDING, rtol=0)


def test_no_shape_depends_on_what_the_graph_computes(model, inputs):
    assert not model.functions, "OpenVINO knows none of ours"
    before = run(model, inputs)
    assert passes.settle_shapes(model) > 0
    assert passes.settle_shapes(model) == 0, "all were settled at once"
    passes.drop_unused(model)
    found = counts(model)
    assert not {"Shape", "Range", "Expand", "Loop", "If", "NonZero"} & set(found)
    assert torch.equal(run(model, inputs), before)


def test_each_of_queries_keys_and_values_gets_a_product(model, inputs):
    before = run(model, inputs)
    products = counts(model)["Gemm"]
    assert passes.split_projections(model) == DEPTH
    passes.drop_unused(model)
    assert counts(model)["Gemm"] == products + 2 * DEPTH
    assert not [name for name in model.graph.initializers if name.endswith("qkv.weight")]
    torch.testing.assert_close(run(model, inputs), before, atol=ROUNDING, rtol=0)
    assert passes.split_projections(model) == 0


def test_hidden_layers_are_no_wider_than_what_goes_in(model, inputs):
    before = run(model, inputs)
    assert passes.split_hidden(model) == DEPTH
    passes.drop_unused(model)
    weights = {name: value.shape for name, value in model.graph.initializers.items()}
    gates = {name: shape for name, shape in weights.items() if "gate_proj.weight" in name}
    assert len(gates) > DEPTH
    assert all(outputs <= inputs for outputs, inputs in map(fixed, gates.values()))
    assert sum("down_proj.bias" in name for name in weights) == DEPTH, "each bias is added once"
    torch.testing.assert_close(run(model, inputs), before, atol=ROUNDING, rtol=0)
    assert passes.split_hidden(model) == 0


@pytest.mark.parametrize("version", ["2.6", "4.5"])
def test_layers_with_gelu_are_cut_too(version: str, tmp_path: Path) -> None:
    folder = write_tiny_minicpmv(tmp_path / "checkpoint", Tiny(version=version))
    graph = export(find_recipe("minicpmv"), Checkpoint.open(folder), form="padded")
    model = translated(graph, unguarded=True)
    depth = len({name.split(".")[1] for name in graph.program.state_dict if name.startswith("blocks.")})
    assert passes.split_hidden(model) == depth
    names = {name for name in model.graph.initializers if "part" in name}
    assert names, "parts keep the layer's name"


def test_a_layer_that_others_read_stays_whole(graph: Graph, model: ir.Model) -> None:
    hidden = next(node for node in model.graph if node.op_type == "Sigmoid").outputs[0]
    model.graph.outputs.append(hidden)
    assert passes.split_hidden(model) == DEPTH - 1
