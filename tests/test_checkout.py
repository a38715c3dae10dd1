"""Straight from a checkout that is not installed, with the few libraries that a GPU machine has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.repo.tree import ROOT
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl

# Libraries that a machine may lack and still build with the backends that compute in torch.
ABSENT = ("av", "openvino", "onnx", "onnxruntime", "onnxscript", "onnx_ir", "platformdirs", "tensorrt_rtx")
WITHOUT = f"""
import sys
class Absent:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path[:] = [Absent, *(each for each in sys.meta_path if "Editable" not in str(each))]
sys.path.insert(0, {str(ROOT)!r})
import importlib.util
looked_up = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in {ABSENT} else looked_up(name, package)
)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, **environment},
    )


def command(*words: str) -> str:
    arguments = ["vlexport", *words]
    return f"import runpy; sys.argv = {arguments!r}; runpy.run_module('vlexport', run_name='__main__')"


def test_doctor_names_each_missing_library(tmp_path) -> None:
    done = run(command("doctor"), XDG_DATA_HOME=str(tmp_path))
    rows = dict(line.split("\t", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    for name in ("av", "platformdirs"):
        assert "not installed" in rows[name]
    # The first of those that a backend needs, and what installs it.
    for name, extra in (("onnxruntime", "vlexport"), ("openvino", "'vlexport[openvino]'")):
        assert (
            f"the package onnx is not installed. pip install {extra} installs it" in rows[f"backend {name}"]
        )


@pytest.mark.slow
def test_eager_builds_without_the_other_backends_libraries(tmp_path) -> None:
    checkpoint = write_tiny_qwen2_5_vl(tmp_path / "tiny", depth=1, with_decoder=False)
    words = ("build", str(checkpoint), "--backend", "eager", "--output-dir", str(tmp_path / "engines"))
    done = run(command(*words), XDG_DATA_HOME=str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_build_without_a_folder_for_approvals_prints_how_to_name_one(tmp_path) -> None:
    checkpoint = write_tiny_qwen2_5_vl(tmp_path / "tiny", depth=1, with_decoder=False)
    words = ("build", str(checkpoint), "--backend", "eager", "--output-dir", str(tmp_path / "engines"))
    done = run(command(*words), XDG_DATA_HOME="")
    assert done.returncode == 2, done.stderr
    assert "set XDG_DATA_HOME" in done.stderr
