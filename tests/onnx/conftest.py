"""One tower, traced and translated once in each form, and its calls."""

from __future__ import annotations

from functools import cache

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import ModelProto

from tests.golden_towers import items_of, sharp_weights, write_recorded_tower
from tests.onnx.portable import portable
from vlexport._build.export import export
from vlexport._build.graph import Graph
from vlexport.checkpoint import Checkpoint
from vlexport.onnx import attention, to_onnx
from vlexport.recipe import find_recipe

# A block with windows and one without.
DEPTH = 2


def translated(graph: Graph, *, unguarded: bool = False) -> ir.Model:
    return to_onnx.graph_model(graph, dense=attention.dense if unguarded else None)


def run(model: ir.Model, inputs: dict[str, torch.Tensor], output: str = "embeds") -> torch.Tensor:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), settings)
    return torch.from_numpy(session.run([output], {name: x.numpy() for name, x in inputs.items()})[0])


@pytest.fixture(scope="module")
def form() -> str:
    return "grouped"


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tower")
    checkpoint = Checkpoint.open(write_recorded_tower(folder, 0, sharp_weights(0, seed=2), DEPTH))
    return cache(lambda form: export(find_recipe("qwen2_5_vl"), checkpoint, form=form))


@pytest.fixture(scope="module")
def graph(graphs, form: str) -> Graph:
    found: Graph = graphs(form)
    return found


@pytest.fixture(scope="module")
def inputs(graph: Graph, form: str) -> dict[str, torch.Tensor]:
    grids = [[1, 10, 18], [2, 12, 6], [1, 2, 2]]
    rows = torch.randn(180 + 144 + 4, 96, generator=torch.Generator().manual_seed(0))
    return graph.recipe.prepare(graph.config, items_of(rows, grids), form)


@pytest.fixture(scope="module")
def stored(graph: Graph, form: str) -> ModelProto:
    model = translated(graph, unguarded=form == "padded")
    if form == "grouped":
        attention.define(model, "SegmentAttention", portable)
    return ir.to_proto(model)


@pytest.fixture
def model(stored: ModelProto) -> ir.Model:
    copy = ModelProto()
    copy.CopyFrom(stored)
    return ir.from_proto(copy)
