"""Attention across segments as an ONNX function equals the operator, for any runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.onnx.conftest import run
from vlexport.onnx import attention, to_onnx
from vlexport.vision.attention.kernels import segment_attention, segment_cross_attention

# Kernels differ in summation order: 3e-7 measured on outputs of size 1.
ROUNDING = 2e-6
RUNS = [[[2, 3, 5]], [[1, 4, 1], [3, 4, 6], [2, 4, 40]], [[5, 1, 2], [1, 7, 3]]]


class Attend(nn.Module):
    """Keys first attend among themselves, so that both operators stand in one graph."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        keys = segment_attention(inputs["k"], inputs["k"], inputs["v"], inputs["own_runs"], 0.5)
        return {"out": segment_cross_attention(inputs["q"], keys, inputs["v"], inputs["runs"], 0.5)}


def inputs_of(runs: list[list[int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(runs))
    queries, seen = (sum(run[0] * run[axis] for run in runs) for axis in (1, 2))
    q = torch.randn(queries, 2, 4, generator=generator)
    k, v = torch.randn(2, seen, 2, 4, generator=generator)
    own = torch.tensor([[count, keys] for count, _, keys in runs], dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "own_runs": own, "runs": torch.tensor(runs, dtype=torch.int32)}


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    dims = {name: torch.export.Dim(name, min=1) for name in ("queries", "seen", "runs")}
    shapes = {
        "q": {0: dims["queries"]},
        "k": {0: dims["seen"]},
        "v": {0: dims["seen"]},
        "own_runs": {0: dims["runs"]},
        "runs": {0: dims["runs"]},
    }
    return torch.export.export(Attend(), (inputs_of(RUNS[1]),), dynamic_shapes=(shapes,), strict=False)


def test_the_function_equals_the_operator(program: torch.export.ExportedProgram) -> None:
    model = to_onnx.to_onnx(program, dict.fromkeys(inputs_of(RUNS[1]), ()), {"out": ()})
    for runs in RUNS:
        inputs = inputs_of(runs)
        expected = Attend()(inputs)["out"]
        torch.testing.assert_close(run(model, inputs, "out"), expected, atol=ROUNDING, rtol=0)


def test_both_operators_are_functions_of_the_model(program: torch.export.ExportedProgram) -> None:
    model = to_onnx.to_onnx(program, dict.fromkeys(inputs_of(RUNS[1]), ()), {"out": ()})
    assert attention.CONTRIB in model.opset_imports
    assert {key[1] for key in model.functions} >= {"SegmentAttention", "SegmentCrossAttention"}
