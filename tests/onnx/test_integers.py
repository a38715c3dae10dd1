"""Weights as integers: the nearest ones, in every layer of every block, or a refusal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.onnx.conftest import DEPTH, translated
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport._build.export import export
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


def test_every_matrix_of_every_block_becomes_integers_and_nothing_else_does(graph, model) -> None:
    weights = dict(graph.program.state_dict)
    plain = Counter(node.op_type for node in model.graph)["Gemm"]
    found = quantize.multiply(model)
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
    found = quantize.multiply(model)
    counts = Counter(node.op_type for node in model.graph)
    assert counts["IntegerLinear"] == len(found)
    assert counts["RoundedRows"] == len(found) // 6 * 4
    quantize.check_complete(found, weights)


def test_stored_integers_are_scaled_before_a_plain_product(model) -> None:
    plain = Counter(node.op_type for node in model.graph)["Gemm"]
    found = quantize.store(model)
    counts = Counter(node.op_type for node in model.graph)
    assert (counts["Gemm"], counts["DequantizeLinear"]) == (plain, len(found))


def test_a_matrix_that_stays_floating_point_is_refused_by_name() -> None:
    weights = {"blocks.0.mlp.weight": torch.zeros(2, 2), "blocks.1.mlp.weight": torch.zeros(2, 2)}
    with pytest.raises(UnsupportedError, match=r"1 matrices .* the first is blocks\.1\.mlp\.weight"):
        quantize.check_complete(["blocks.0.mlp.weight"], weights)
