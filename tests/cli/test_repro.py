"""`repro` of libraries that run here: the archive runs without vlexport, and its script finds faults."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.lines import bundle_of, own_copy, vlexport
from tests.cli.test_compare import model
from vlexport.backends import find_backend
from vlexport.backends._inspection import write_run
from vlexport.bundle import Bundle, Verdict
from vlexport.parity.report import ParityReport
from vlexport.tools import repro

MISSING = find_backend("openvino").missing()
OPENVINO = pytest.param("openvino", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING)))
FORBIDDEN = "import runpy, sys; sys.modules['vlexport'] = None; sys.modules['torch'] = None; "


def run_alone(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script where vlexport and torch cannot be imported."""
    program = FORBIDDEN + "runpy.run_path('run.py', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip


def write(folder, name, array):
    (folder / name).write_bytes(array.tobytes())
    return {"file": name, "dtype": str(array.dtype), "shape": list(array.shape)}


@pytest.fixture
def product(tmp_path):
    """An archive's folder by hand: relu(x @ 0.5) of positive rows, with outputs by numpy."""
    made = onnx.load(model(tmp_path / "model.onnx"))
    # ONNX Runtime reads older versions than onnx writes.
    made.ir_version, made.opset_import[0].version = 10, 20
    onnx.save(made, tmp_path / "model.onnx")
    rows = np.random.default_rng(0).random((5, 4), dtype=np.float32)
    out = rows @ np.full((4, 8), 0.5, np.float32)
    cases = [{"name": "rows", "inputs": {"x": write(tmp_path, "x.bin", rows)}}]
    (tmp_path / "inputs.json").write_text(json.dumps({"cases": cases}))
    job = {"library": "onnxruntime", "model": "model.onnx", "device": "CPUExecutionProvider", "settings": {}}
    write_run(tmp_path, job)

    def expect(out):
        outputs = {"rows": {"y": write(tmp_path, "y.bin", out)}}
        limits = {"relative_l2": 1e-5, "worst_token": 5e-5}
        (tmp_path / "expected.json").write_text(json.dumps({"limits": limits, "outputs": outputs}))
        return run_alone(tmp_path)

    return out, expect


def test_the_script_distinguishes_right_outputs_from_wrong_ones(product):
    out, expect = product
    ran = expect(out)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[0].startswith("onnxruntime ")
    assert ran.stdout.splitlines()[1].startswith(f"rows: y [{len(out)}, 8]: relative_l2 ")
    assert ran.stdout.splitlines()[1].endswith(": ok")
    assert ran.stdout.endswith("\npassed: 1 calls, 0 outputs over a limit\n")
    wrong = out.copy()
    wrong[1] *= 1.001
    ran = expect(wrong)
    assert ran.returncode == 1
    assert "worst_token 0.001 of 5e-05 (row 1): differs" in ran.stdout
    assert expect(out[:1]).returncode == 1


def test_what_the_library_raises_is_printed(product, tmp_path):
    out, expect = product
    inputs = json.loads((tmp_path / "inputs.json").read_text())
    inputs["cases"][0]["inputs"]["x"]["shape"] = [4, 5]
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    ran = expect(out)
    assert ran.returncode == 1
    assert "INVALID_ARGUMENT" in ran.stderr


def test_backends_of_torch_are_refused_with_what_to_do_instead(built, tmp_path):
    ran = vlexport("repro", built, "--output", tmp_path / "none.zip").ends(2)
    assert "bundle of backend 'eager' given; `repro` supports bundles of: onnxruntime, openvino, " in ran.err
    assert "Build the checkpoint with --backend onnxruntime too" in ran.err
    assert list(tmp_path.iterdir()) == []


def unpacked(archive):
    folder = archive.with_suffix("")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    return folder


def contents(archive):
    """The files of an archive. OpenVINO numbers constants through a whole process, and here it is one."""
    with zipfile.ZipFile(archive) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    return {
        name: re.sub(rb'(name="[^"]*?_)\d+"', rb'\1N"', content) if name.endswith(".xml") else content
        for name, content in files.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", OPENVINO])
@pytest.mark.parametrize("precision", [(), ("--quantize", "int8")], ids=["float32", "int8"])
@pytest.mark.parametrize(
    "words",
    [(), pytest.param(("--whole",), marks=pytest.mark.full), ("--whole", "--own-weights")],
    ids=["block", "whole", "own"],
)
def test_an_archive_runs_with_the_library_alone_and_agrees(
    checkpoint, engines, tmp_path, backend, precision, words
):
    bundle = bundle_of(checkpoint, "--backend", backend, *precision, "--output-dir", engines)
    ran = vlexport("repro", bundle, "--output", tmp_path / "bug.zip", *words)
    assert (ran.code, ran.lines) == (0, [str(tmp_path / "bug.zip")]), ran.err
    folder = unpacked(tmp_path / "bug.zip")
    alone = run_alone(folder)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    *calls, verdict = alone.stdout.splitlines()[1:]
    assert [line.rpartition(": ")[2] for line in calls] == ["ok"] * 2
    assert verdict == "passed: 2 calls, 0 outputs over a limit"
    readme = (folder / "README.txt").read_text()
    assert (
        f"runs {'model.onnx' if backend == 'onnxruntime' else 'model.xml'} with {backend} and numpy" in readme
    )
    assert ("cut to block 0 of 1" in readme) == (words == ())
    assert not list(folder.rglob("trtexec.txt"))
    versions = json.loads((folder / "versions.json").read_text())
    assert {backend, "torch", "python", "system", "processor"} <= set(versions)
    vlexport("repro", bundle, "--output", tmp_path / "again.zip", *words).ends(0)
    first, second = (contents(tmp_path / name) for name in ("bug.zip", "again.zip"))
    assert first == second


@pytest.mark.slow
def test_the_whole_graph_with_own_weights_is_the_bundles_and_else_nobodys(checkpoint, engines, tmp_path):
    bundle = bundle_of(checkpoint, "--backend", "onnxruntime", "--output-dir", engines)
    names = ("model.onnx", "model.weights")
    for path, words in ((tmp_path / "own.zip", ("--own-weights",)), (tmp_path / "random.zip", ())):
        assert vlexport("repro", bundle, "--output", path, "--whole", *words).code == 0
    own, random = unpacked(tmp_path / "own.zip"), unpacked(tmp_path / "random.zip")
    assert [(own / name).read_bytes() for name in names] == [(bundle / name).read_bytes() for name in names]
    floats = {}
    for folder in (own, random):
        loaded = onnx.load(folder / "model.onnx")
        floats[folder] = {
            each.name: onnx.numpy_helper.to_array(each, str(folder))
            for each in loaded.graph.initializer
            if each.data_type == onnx.TensorProto.FLOAT and len(each.dims) == 2
        }
    assert floats[own].keys() == floats[random].keys()
    assert len(floats[own]) > 5
    for name, values in floats[random].items():
        assert len(np.unique(np.abs(values))) == 1, name
        assert not np.array_equal(values, floats[own][name])


@pytest.mark.slow
def test_the_call_that_failed_the_accuracy_check_is_the_one_in_the_archive(checkpoint, engines, tmp_path):
    bundle = bundle_of(checkpoint, "--backend", "onnxruntime", "--output-dir", engines)
    failing = own_copy(bundle, tmp_path / "failing")
    report = ParityReport.from_json(Bundle.open(failing).verdict.table)
    rows = [
        replace(row, metrics={**row.metrics, "relative_l2": 1.0}) if row.shapes == "very wide" else row
        for row in report.rows
    ]
    table = replace(report, rows=tuple(rows), subject=None)
    assert table.status == "failed"
    Bundle.open(failing).with_verdict(Verdict(status="failed", table=table.to_json()))
    assert vlexport("repro", failing, "--output", tmp_path / "bug.zip").code == 0
    folder = unpacked(tmp_path / "bug.zip")
    (case,) = json.loads((folder / "inputs.json").read_text())["cases"]
    assert case["name"].endswith("very-wide")
    assert "failed in the accuracy check" in (folder / "README.txt").read_text()
    assert run_alone(folder).returncode == 0


@pytest.mark.slow
def test_inputs_are_exported_for_every_backend(built: Path, tmp_path: Path):
    ran = vlexport("repro", built, "--inputs-only", "-o", tmp_path / "inputs", "--json").ends(0)
    stored = json.loads((tmp_path / "inputs" / "inputs.json").read_text())
    assert len(ran.document["cases"]) == len(stored["cases"]) == 3


@pytest.mark.slow
def test_a_folder_that_is_there_is_not_written_into(built: Path, tmp_path: Path):
    ran = vlexport("repro", built, "--inputs-only", "--output", tmp_path).ends(2)
    assert f"--output {tmp_path}: exists; a new folder is expected" in ran.err


@pytest.mark.slow
def test_inputs_that_cannot_be_written_leave_nothing_behind(built: Path, tmp_path: Path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(repro, "write_raw", full)
    words = ("repro", built, "--inputs-only", "--output", tmp_path / "inputs")
    vlexport(*words).ends(7)
    assert list(tmp_path.iterdir()) == []
    assert "--own-weights or --lora" in vlexport(*words, "--lora", tmp_path).ends(2).err
