"""Builds of any backend in a process of their own: limits and crashes are errors, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import vlexport
from tests._build.test_build_faults import SCRIPT, SECONDS, leftovers, until, visible
from tests.cli.lines import vlexport as command
from tests.fire import MARK, running
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.limits import needs_process
from vlexport.errors import CheckpointError, VlexportError

# A recipe whose tower ends the process while it is made.
CRASHING = """
import os, signal
from dataclasses import fields

from vlexport.recipe import Recipe
from vlexport.recipes.qwen2_5_vl import RECIPE as RIGHT


def crash(*_):
    os.kill(os.getpid(), signal.SIGSEGV)


OTHER = ("name", "summary", "model_types", "modules")
SAME = {field.name: getattr(RIGHT, field.name) for field in fields(RIGHT) if field.name not in OTHER}
RECIPE = Recipe(name="crashing", summary="crashes", model_types=("qwen2_5_vl",), modules=crash, **SAME)
"""


def test_limits_and_libraries_that_crash_get_a_process_and_a_backend_that_starts_one_does_not() -> None:
    limited = [
        needs_process({"backend": name, "build_seconds": 5}) for name in ("eager", "openvino", "tensorrt_rtx")
    ]
    assert limited == [True, True, False]
    assert [needs_process({"backend": name}) for name in ("eager", "torch_tensorrt")] == [False, True]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("checkpoints") / "tiny", depth=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [*(pytest.param(name, marks=pytest.mark.full) for name in ("onnxruntime", "openvino", "inductor"))],
)
def test_a_build_within_its_limits_is_the_build_without_them(
    checkpoint: Path, tmp_path: Path, backend: str
) -> None:
    words = ("build", checkpoint, "--backend", backend, "--profile", "image", "--output-dir", tmp_path)
    limited = command(*words, "--build-seconds", 500, "--build-memory", 16)
    assert limited.code == 0, limited.err
    again = command(*words)
    assert (again.code, again.out) == (0, limited.out)
    assert "already built" in again.err


@pytest.mark.slow
@pytest.mark.thirty("builds short of memory", 1)
@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino", "inductor"])
@pytest.mark.parametrize(
    ("limit", "reason"),
    [(("--build-seconds", 2), "longer than 2 s"), (("--build-memory", 0.1), "out of memory")],
)
def test_a_build_beyond_its_limits_is_exit_code_7_and_leaves_nothing(
    checkpoint, tmp_path, backend, limit, reason
):
    ran = command("build", checkpoint, "--backend", backend, "--output-dir", tmp_path, *limit)
    assert ran.code == 7, ran.err
    assert reason in ran.err
    assert (visible(tmp_path), leftovers(tmp_path)) == ([], [])


@pytest.mark.slow
@pytest.mark.thirty("crashes of a build", 1)
@pytest.mark.parametrize("backend", ["eager", "openvino", "inductor"])
def test_a_build_that_crashes_twice_is_an_error_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, backend: str
) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    phases: list[str] = []
    with pytest.raises(VlexportError, match=rf"backend '{backend}' crashed twice while building: status -11"):
        vlexport.build(
            checkpoint,
            backend,
            recipe=str(tmp_path / "crashing.py"),
            build_seconds=500,
            output_dir=tmp_path / "engines",
            progress=lambda phase, _: phases.append(phase),
        )
    assert phases.count("again after a crash") == 1
    assert (visible(tmp_path / "engines"), leftovers(tmp_path / "engines")) == ([], [])


HERE, APART = (), ("--build-seconds", "500")


def compiles(mark: str) -> bool:
    """Return whether a command has a C++ compiler at work."""
    names = [Path(f"/proc/{pid}/comm") for pid in running(mark)]
    return any(name.exists() and name.read_text() == "cc1plus\n" for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "number", "limits"),
    [
        ("openvino", signal.SIGINT, HERE),
        ("openvino", signal.SIGTERM, APART),
        ("inductor", signal.SIGTERM, HERE),
        pytest.param("inductor", signal.SIGINT, APART, marks=pytest.mark.full),
        ("inductor", signal.SIGKILL, APART),
    ],
)
def test_a_build_that_is_stopped_in_its_library_leaves_no_process_and_no_file(
    checkpoint: Path, tmp_path: Path, backend: str, number: int, limits: tuple[str, ...]
) -> None:
    into, temporary, mark = tmp_path / "engines", tmp_path / "temporary", uuid.uuid4().hex
    temporary.mkdir()
    # A cache of its own, so that there is something to compile.
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    process = subprocess.Popen(
        [SCRIPT, "build", checkpoint, "--backend", backend, "--output-dir", into, *limits],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    until(process, "build")
    while backend == "inductor" and process.poll() is None and not compiles(mark):
        time.sleep(0.01)
    begun = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < SECONDS
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), err
    while running(mark) and time.monotonic() - begun < SECONDS:
        time.sleep(0.01)
    print(f"{time.monotonic() - begun:.2f} s")
    assert running(mark) == []
    assert visible(into) == []
    if number != signal.SIGKILL:
        assert (leftovers(into), list(temporary.iterdir())) == ([], [])


@pytest.mark.slow
def test_errors_keep_their_class_and_bounds_their_values(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        vlexport.build(tmp_path / "nowhere", "eager", build_seconds=500, output_dir=tmp_path)
    options: dict[str, Any] = {"max_pixels": 6000, "max_images": 1, "output_dir": tmp_path}
    limited = vlexport.build(checkpoint, "eager", build_seconds=500, **options)
    assert limited == vlexport.build(checkpoint, "eager", **options)
