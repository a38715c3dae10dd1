"""The suite of `make test-vllm`, which sets up an environment with vLLM; elsewhere nothing is collected."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def bundle(shared: Path) -> Callable[..., Path]:
    """Build a bundle of a checkpoint, once for the run."""
    from vlexport._build import build_checkpoint, request
    from vlexport.checkpoint import Checkpoint

    def made(checkpoint: Path, backend: str = "onnxruntime", **options: Any) -> Path:
        spec = request(Checkpoint.open(checkpoint), backend=backend, into=shared / "engines", **options)
        return build_checkpoint(spec).require_passed().path

    return made


@pytest.fixture
def answers(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Answer cases of a recorded set with vLLM; a process that fails raises its last words."""

    def run(folder: Path, cases: list[str], bundle: Path | None = None, **rest: Any) -> dict[str, Any]:
        entry = rest.pop("entry", {})
        checkpoint = rest.pop("checkpoint", None)
        if bundle is not None:
            rest["additional_config"] = {"vlexport": {"bundle": str(bundle), "threads": 1, **entry}}
        job, out = tmp_path / "job.json", tmp_path / "out.json"
        job.write_text(
            json.dumps(
                {
                    "set": str(folder),
                    "cases": cases,
                    "checkpoint": checkpoint and str(checkpoint),
                    "options": rest,
                }
            )
        )
        words = [sys.executable, "-m", "tests.vllm.answers", str(job), str(out)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise AssertionError(done.stderr[-8000:])
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return run
