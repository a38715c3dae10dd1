"""Homes and temporary folders that cannot be used; a checkout that is not installed, with few libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import vlexport
from tests._build.test_build_faults import in_namespace
from tests.repo.tree import ROOT
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.bundle import Bundle

# Without a home nothing is cached, and a compiler would take a minute.
HOME = "XDG_DATA_HOME= XDG_CACHE_HOME= CXX=/nowhere/g++"
BACKENDS = ("eager", "inductor")
# The environment, codes of a first build and of an `encode` by backend, and the cause in the messages.
CASES: dict[str, tuple[str, dict[str, tuple[int, int]], str]] = {
    "no home": (f"-u HOME {HOME}", {"eager": (0, 0)}, ""),
    "a read-only home": (f"{HOME} HOME=$PWD/ro", {"eager": (0, 0)}, "ro/.local/share/vlexport/trusted"),
    "a home that is none": (f"{HOME} HOME=/proc/home", {"eager": (0, 0)}, "/proc/home/.local"),
    "noexec": ("TMPDIR=$PWD/noexec", {"eager": (0, 0), "inductor": (4, 4)}, "noexec: mounted noexec"),
    "missing": ("TMPDIR=$PWD/missing", {"eager": (0, 0), "inductor": (4, 4)}, "missing: cannot be used"),
    "full": ("TMPDIR=$PWD/full", {"eager": (0, 0), "inductor": (7, 7)}, "full: "),
}


# Those whose causes the others have too.
REST = {("a home that is none", "eager"), ("missing", "eager"), ("missing", "inductor"), ("full", "eager")}
PAIRS = [
    pytest.param(case, backend, marks=pytest.mark.full if (case, backend) in REST else ())
    for case, (_, codes, _) in CASES.items()
    for backend in codes
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("checkpoint") / "tiny", depth=1, with_decoder=False)


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Bundles of a machine without faults."""
    into = tmp_path_factory.mktemp("engines")
    return {name: vlexport.build(checkpoint, name, profile="thumbnail", output_dir=into) for name in BACKENDS}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), PAIRS)
def test_a_first_build_and_an_encode_end_with_the_right_code_and_the_cause(
    tmp_path: Path, checkpoint: Path, built: dict[str, Bundle], case: str, backend: str
) -> None:
    (variables, codes, cause), bundle = CASES[case], built[backend]
    Image.new("RGB", (56, 56), "red").save(tmp_path / "picture.png")
    program = f"""
        mkdir ro noexec full && mount -t tmpfs -o ro none ro && mount -t tmpfs -o noexec none noexec || exit 9
        mount -t tmpfs -o size=64k none full && head -c 65536 /dev/zero > full/filler
        env {variables} "$1" build {checkpoint} --backend {backend} --profile thumbnail \\
            --output-dir engines > build.out 2> build.err; echo $?
        # What the build advises where an approval cannot be kept.
        env {variables} XDG_DATA_HOME=$PWD/data "$1" trust {bundle.path} {bundle.digest} > trust.out || exit 8
        env {variables} XDG_DATA_HOME=$PWD/data "$1" encode {bundle.path} picture.png \\
            --output out.safetensors > encode.out 2> encode.err; echo $?
        ls -A noexec; ls -A engines
    """
    ran = in_namespace(program, tmp_path)
    words = (tmp_path / "build.err").read_text() + (tmp_path / "encode.err").read_text()
    code, encoded, *left = ran.stdout.splitlines()
    assert (int(code), int(encoded)) == codes[backend], words
    assert cause in words
    assert "intact copy" not in words
    bundles = [name for name in left if not name.startswith(".lock-")]
    assert len(bundles) == (code == "0"), left
    if code == "0":
        manifest = json.loads((tmp_path / "engines" / bundles[0] / "manifest.json").read_bytes())
        assert manifest["parity"]["status"] == "passed"
    assert (tmp_path / "out.safetensors").exists() == (encoded == "0")


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


@pytest.mark.seconds
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
@pytest.mark.parametrize(("place", "code", "words"), [("data", 0, ""), ("", 2, "set XDG_DATA_HOME")])
def test_eager_builds_without_the_others_libraries_where_a_folder_for_approvals_is_named(
    checkpoint, tmp_path, place, code, words
) -> None:
    build = command("build", str(checkpoint), "--backend", "eager", "--output-dir", str(tmp_path / "engines"))
    done = run(build, XDG_DATA_HOME=place and str(tmp_path / place))
    assert done.returncode == code, done.stderr
    assert words in done.stderr
