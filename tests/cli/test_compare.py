"""`compare`: what differs between two bundles, tables or graphs, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace

import onnx
import pytest
from onnx import TensorProto, helper

from tests.bundle.examples import MANIFEST
from tests.cli.lines import Terminal, change_manifest, own_copy, vlexport
from vlexport.bundle import Bundle, Trust, Verdict
from vlexport.bundle.files import FileRecord
from vlexport.bundle.manifest import AdapterIdentity
from vlexport.cli import run
from vlexport.parity.report import ParityReport, Row, count_row


def changed(built, path, *, graph=None, **values):
    """Return a copy of a bundle with other values in its manifest, and a graph if one is given."""
    own_copy(built, path)
    files = dict(Bundle.open(path).manifest.files)
    if graph is not None:
        content = graph.read_bytes()
        (path / "model.onnx").write_bytes(content)
        files["model.onnx"] = FileRecord(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    change_manifest(path, files=files, **values)
    return path


def document(bundle, path, *, stored=True):
    """Write what `check --accuracy --json` would; `test_bundles.py` compares with a real one."""
    opened = Bundle.open(bundle)
    content = {
        "schema": 1, "verb": "check", "stored": stored,
        "identity": opened.manifest.identity(),
        "table": ParityReport.from_json(opened.verdict.table).to_json(),
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def built(tmp_path):
    """A bundle of a few bytes, with an accuracy table of 8 rows; `test_bundles.py` compares a real one."""
    path = tmp_path / "built"
    path.mkdir()
    (path / "program.pt2").write_bytes(b"p" * 1000)
    shapes = ("very wide", "very tall", "mix", "two images", "far rows: 1002 a side", "a video", "one window")
    rows = [count_row("weights", 0, "bytes")] + [
        Row(
            level="L1", check="embeds", shapes=each, origin="measured",
            metrics={"relative_l2": number * 1e-7, "worst_token": number * 3e-7, "worst_at": 5.0},
            limits={"relative_l2": 1e-5, "worst_token": 5e-5},
        )
        for number, each in enumerate(shapes, 1)
    ]  # fmt: skip
    report = ParityReport(rows=tuple(rows), required=("L0", "L1"))
    files = {"program.pt2": FileRecord(size=1000, sha256=hashlib.sha256(b"p" * 1000).hexdigest())}
    made = replace(MANIFEST, files=files, parity=Verdict(status=report.status, table=report.to_json()))
    (path / "manifest.json").write_bytes(made.encoded())
    Trust.of().record(made.digest(), "built")
    return path


@pytest.fixture
def worse(built, tmp_path):
    """A copy for another version of torch whose tokens are nearer to their limit by a factor of 2."""
    manifest = Bundle.open(built).manifest
    report = ParityReport.from_json(manifest.parity.table)
    rows = [
        replace(row, metrics={name: 2 * value for name, value in row.metrics.items()})
        if row.level == "L1"
        else row
        for row in report.rows
    ]
    table = replace(report, rows=tuple(rows))
    return changed(
        built, tmp_path / "worse",
        versions={**manifest.versions, "torch": "2.99"},
        parity=Verdict(status=table.status, table=table.to_json()),
    )  # fmt: skip


def test_identity_is_compared_field_by_field(built, worse):
    found = vlexport("compare", built, worse, "--json").document
    before, after = (Bundle.open(each).manifest for each in (built, worse))
    assert {each["name"]: (each["first"], each["second"]) for each in found["identity"]} == {
        "created": (before.created, after.created),
        "versions.torch": (before.versions["torch"], "2.99"),
    }
    assert (found["kind"], found["first"], found["second"]) == ("bundle", str(built), str(worse))


def test_accuracy_is_compared_row_by_row_by_the_metric_nearest_to_its_limit(built, worse):
    found = vlexport("compare", built, worse, "--json").document
    report = ParityReport.from_json(Bundle.open(built).verdict.table)
    assert {(row["level"], row["check"], row["shapes"]) for row in found["rows"]} == {
        (row.level, row.check, row.shapes) for row in report.rows
    }
    measured = [row for row in found["rows"] if row["level"] == "L1" and row["first"]["share"]]
    assert len(measured) > 5
    for row in measured:
        assert row["second"]["share"] == pytest.approx(2 * row["first"]["share"])
        assert row["first"]["share"] == pytest.approx(row["first"]["value"] / row["first"]["limit"])
    assert found["summaries"][0] == report.summary()


def test_files_are_compared_by_size_and_graphs_by_what_diff_counts(built, tmp_path):
    graphs = [model(tmp_path / "a.onnx"), model(tmp_path / "b.onnx", width=6, twice=True)]
    first, second = (changed(built, tmp_path / path.stem, graph=path) for path in graphs)
    found = vlexport("compare", first, second, "--json").document
    (graph,) = found["graphs"]
    (counted,) = vlexport("compare", first, second, "--graph", "model.onnx", "--json").document["graphs"]
    assert (graph["name"], graph["nodes"]) == ("model.onnx", counted["nodes"])
    assert graph["differences"] == counted["differences"]
    assert found["sizes"]["model.onnx"] == [path.stat().st_size for path in graphs]
    assert found["sizes"]["program.pt2"] == [(built / "program.pt2").stat().st_size] * 2
    without = vlexport("compare", built, second, "--json").document
    assert (without["graphs"], without["sizes"]["model.onnx"]) == ([], [None, graphs[1].stat().st_size])
    assert onnx.load(graphs[1]).graph.node


def test_a_table_is_compared_with_a_table_or_with_a_bundles_own(built, worse, tmp_path):
    first, second = document(built, tmp_path / "a.json"), document(worse, tmp_path / "b.json")
    whole = vlexport("compare", built, worse, "--json").document
    for pair in ((first, second), (built, second), (first, worse)):
        found = vlexport("compare", *pair, "--json").document
        assert found["kind"] == "accuracy table"
        assert (found["rows"], found["identity"]) == (whole["rows"], whole["identity"])


def test_results_of_other_weights_are_refused_unless_the_caller_insists(built, tmp_path):
    origin = Bundle.open(built).manifest.checkpoint
    other = changed(built, tmp_path / "other", checkpoint={"weights": "0" * 64})
    ran = vlexport("compare", built, other).ends(2)
    assert f"weights differ ({origin.weights[:12]} and 000000000000)" in ran.err
    assert "allow_different compares all the same" in ran.err
    ran = vlexport("compare", built, other, "--allow-different", "--json")
    assert (ran.code, len(ran.document["waived"])) == (0, 1)
    assert "checkpoint.weights" in {each["name"] for each in ran.document["identity"]}
    adapter = AdapterIdentity(source="lora", digest="a" * 64)
    adapted = changed(built, tmp_path / "adapted", checkpoint={"adapter": adapter})
    short = origin.weights[:12]
    assert (
        f"weights differ ({short} and {short} with aaaaaaaaaaaa)" in vlexport("compare", built, adapted).err
    )
    elsewhere = document(built, tmp_path / "elsewhere.json", stored=False)
    assert "was checked against other weights than its own" in vlexport("compare", built, elsewhere).err


def test_what_is_no_result_or_was_altered_is_refused(built, tmp_path):
    good = document(built, tmp_path / "good.json")
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "list.json").write_text('{"schema": 1, "verb": "list"}')
    (tmp_path / "object.json").write_text('{"schema": 1, "verb": {}}')
    altered = json.loads(good.read_text())
    altered["table"]["rows"][0]["metrics"] = {"wrong": 5.0}
    (tmp_path / "altered.json").write_text(json.dumps(altered))
    odd = {
        "name": "a", "base": "a", "rounds": [[0.5]], "ms_p50": 0.5, "ms_p90": 0.5, "ratio": {"low": 1.0},
        "relative_l2": None, "peak_bytes": None, "graphs": "", "reason": "", "identity": {},
    }  # fmt: skip
    timings = {
        "schema": 1, "verb": "bench", "unit": "s", "patches": 4, "tokens": 1, "machine": {}, "workload": {},
        "contenders": [],
    }  # fmt: skip
    for name, more in (
        ("bench.json", {}),
        ("units.json", {"unit": "ms"}),
        ("ratio.json", {"contenders": [odd]}),
        ("rounds.json", {"contenders": [{**odd, "ratio": None, "rounds": [[0.5], [0.0]]}]}),
    ):
        (tmp_path / name).write_text(json.dumps({**timings, **more}))
    for name, words in (
        ("text.json", "no result of vlexport"),
        ("list.json", "verb 'list' found"),
        ("object.json", "schema 1, verb "),
        ("none.json", "No such file"),
        ("altered.json", "altered since it was written"),
        ("ratio.json", "bench.contenders[0].ratio"),
        ("rounds.json", "contenders.rounds: seconds of calls, above 0, expected"),
        ("units.json", "times in 'ms' found, in 's' expected"),
        ("bench.json", f"{built}: bundle, {tmp_path / 'bench.json'}: timings. Two bundles"),
    ):
        assert words in vlexport("compare", built, tmp_path / name).ends(2).err
    broken = own_copy(built, tmp_path / "broken")
    (broken / "manifest.json").write_text("{}")
    assert vlexport("compare", built, broken).code == 5
    assert vlexport("compare", built, tmp_path).code == 2


def test_a_bundle_from_elsewhere_is_approved_by_its_digest(built, tmp_path):
    strange = own_copy(built, tmp_path / "strange")
    made = change_manifest(strange, trusted=False, created="2031-01-01T00:00:00Z")
    assert vlexport("compare", built, strange).code == 5
    ran = vlexport("trust", strange, "0" * 64)
    assert (ran.code, f"its digest is {made.digest()}, and {'0' * 64} was approved" in ran.err) == (5, True)
    assert "or the first 12" in vlexport("trust", strange, made.digest()[:11]).ends(2).err
    ran = vlexport("trust", strange, f"sha256:{made.digest()[:12]}")
    assert (ran.code, f"digest {made.digest()} approved" in ran.out) == (0, True)
    assert vlexport("compare", built, strange).code == 0


def test_the_tables_fit_100_columns(built, worse, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    with redirect_stdout(out):
        assert run(["compare", str(built), str(worse)]) == 0
    lines = re.sub(r"\x1b\[\d*m", "", out.getvalue()).splitlines()
    # Paths are never cut.
    assert max(len(line) for line in lines if not line.startswith(("A  ", "B  "))) <= 100
    assert [line for line in lines if "versions.torch" in line and "2.99" in line]
    assert [line for line in lines if "embeds" in line and "14%, one window" in line]
    assert not [line for line in lines if "weights" in line], "exact rows that passed are left out"
    assert len(lines) < 40


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
    ran = vlexport("compare", path, path, "--json")
    (graph,) = ran.document["graphs"]
    assert (ran.code, ran.document["kind"], graph["differences"], graph["nodes"]) == (0, "graphs", [], [2, 2])


def test_operators_inputs_and_weights_differ_by_shape(tmp_path):
    first, second = model(tmp_path / "a.onnx"), model(tmp_path / "b.onnx", width=6, twice=True)
    (found,) = vlexport("compare", first, second, "--json").document["graphs"]
    rows = set(map(tuple, found["differences"]))
    assert rows == {
        ("output", "y", "float [rows, 8]", 1, 0),
        ("output", "y", "float [rows, 6]", 0, 1),
        ("weight", "float", "[4, 8]", 1, 0),
        ("weight", "float", "[4, 6]", 0, 1),
        ("operator", "Relu", "[rows, 8]", 1, 0),
        ("operator", "Relu", "[rows, 6]", 0, 3),
        ("operator", "If", "?", 0, 1),
    }
    ran = vlexport("compare", first, second)
    assert "operator\tIf\t?\t0\t1" in ran.lines
    assert "model.onnx: 2 and 5 nodes" in ran.lines


def test_nodes_in_bodies_of_functions_are_compared(tmp_path):
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path, kind in zip(paths, ("Relu", "Abs"), strict=True):
        whole = onnx.load(model(path, twice=True))
        (branch,) = (node for node in whole.graph.node if node.op_type == "If")
        for attribute in branch.attribute:
            attribute.g.node[0].op_type = kind
        opset = helper.make_opsetid("", 20)
        whole.functions.append(helper.make_function("own", "F", ["h", "yes"], ["z"], [branch], [opset]))
        whole.graph.node.remove(branch)
        onnx.save(whole, path)
    (found,) = vlexport("compare", *paths, "--json").document["graphs"]
    rows = set(map(tuple, found["differences"]))
    assert rows == {("operator", "Relu", "[rows, 8]", 3, 1), ("operator", "Abs", "[rows, 8]", 0, 2)}


def test_what_is_no_graph_is_refused(tmp_path, built):
    path = model(tmp_path / "a.onnx")
    (tmp_path / "b.onnx").write_bytes(b"\xff" * 9)
    for other, words in (
        (tmp_path / "b.onnx", "not an ONNX model"),
        (tmp_path / "c.onnx", "No such file"),
        (built, "no payload 'model.onnx'"),
    ):
        assert words in vlexport("compare", path, other).ends(2).err
