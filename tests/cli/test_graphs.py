"""`diff` of two ONNX graphs, and completion."""

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.cli.lines import vlexport

SCRIPT = Path(sys.executable).with_name("vlexport")


def model(path, *, width=8, twice=False):
    """Write relu(x @ w), or with a second relu in an If."""
    rows = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", width])
    weights = helper.make_tensor("w", TensorProto.FLOAT, [4, width], [0.5] * 4 * width)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    if twice:
        body = helper.make_graph([helper.make_node("Relu", ["h"], ["b"])], "body", [], [
            helper.make_tensor_value_info("b", TensorProto.FLOAT, ["rows", width])])  # fmt: skip
        nodes.insert(1, helper.make_node("If", ["yes"], ["z"], then_branch=body, else_branch=body))
    graph = helper.make_graph(nodes, "g", [rows], [out], [weights])
    onnx.save(helper.make_model(graph), path)
    return path


def test_equal_graphs_have_no_differences(tmp_path):
    path = model(tmp_path / "a.onnx")
    ran = vlexport("diff", path, path, "--json")
    assert (ran.code, ran.document["differences"], ran.document["nodes"]) == (0, [], [2, 2])


def test_operators_inputs_and_weights_differ_by_shape(tmp_path):
    first, second = model(tmp_path / "a.onnx"), model(tmp_path / "b.onnx", width=6, twice=True)
    found = vlexport("diff", first, second, "--json").document
    rows = {tuple(row.values()) for row in found["differences"]}
    assert rows == {
        ("output", "y", "float [rows, 8]", 1, 0),
        ("output", "y", "float [rows, 6]", 0, 1),
        ("weight", "float", "[4, 8]", 1, 0),
        ("weight", "float", "[4, 6]", 0, 1),
        ("operator", "Relu", "[rows, 8]", 1, 0),
        ("operator", "Relu", "[rows, 6]", 0, 3),
        ("operator", "If", "?", 0, 1),
    }
    ran = vlexport("diff", first, second)
    assert "operator\tIf\t?\t0\t1" in ran.lines
    assert "2 and 5 nodes; 7 differences" in ran.err


def test_what_is_no_graph_is_refused(tmp_path, built):
    path = model(tmp_path / "a.onnx")
    (tmp_path / "b.onnx").write_bytes(b"\xff" * 9)
    for other, words in (
        (tmp_path / "b.onnx", "not an ONNX model"),
        (tmp_path / "c.onnx", "No such file"),
        (built, "no payload 'model.onnx'"),
    ):
        ran = vlexport("diff", path, other)
        assert ran.code == 2
        assert words in ran.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_the_command(shell):
    ran = vlexport("completion", shell)
    assert ran.code == 0
    assert "_VLEXPORT_COMPLETE" in ran.out
    assert "vlexport" in ran.out


def test_the_variable_of_the_script_completes_commands():
    variables = {"_VLEXPORT_COMPLETE": "complete_bash", "COMP_WORDS": "vlexport bui", "COMP_CWORD": "1"}
    ran = subprocess.run(
        [SCRIPT], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == ["build"]
