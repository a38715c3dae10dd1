"""The suite of `make test-vllm`, which sets up an environment with vLLM; elsewhere nothing is collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
if find_spec("vllm"):
    from tests.vllm.client import serve  # noqa: F401  a fixture


@pytest.fixture(scope="session")
def bundle(shared: Path) -> Callable[..., Path]:
    from vlexport._build.build import build_checkpoint
    from vlexport._build.request import request
    from vlexport.checkpoint import Checkpoint

    def made(checkpoint: Path, backend: str = "onnxruntime", **options: Any) -> Path:
        spec = request(Checkpoint.open(checkpoint), backend=backend, output_dir=shared / "engines", **options)
        return build_checkpoint(spec).require_passed().path

    return made


class Answering:
    """A process of `tests.vllm.answers`; what it logs lies in a file."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.answers"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | environment,
            )

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        start = self.log.stat().st_size
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "The process ended."}
        if "error" in found:
            raise AssertionError(f"{self.log.read_bytes()[start:].decode()[-8000:]}\n{found['error']}")
        return found

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture(scope="session")
def cache(shared: Path) -> dict[str, str]:
    """Where vLLM keeps what it has found out about models."""
    return {"VLLM_CACHE_ROOT": str(shared / "vllm"), "HF_MODULES_CACHE": str(shared / "modules")}


@pytest.fixture(scope="session")
def answering(shared: Path, cache: dict[str, str]) -> Iterator[Answering]:
    """One process for most of the suite: importing vLLM takes longer than starting an engine."""
    started = Answering(shared / "answers.log", **cache)
    yield started
    started.close()


@pytest.fixture
def another(tmp_path: Path, cache: dict[str, str]) -> Iterator[Callable[..., Answering]]:
    """Start processes for what a process keeps: roles, ranks."""
    started: list[Answering] = []

    def start(**environment: str) -> Answering:
        started.append(Answering(tmp_path / f"{len(started)}.log", **cache, **environment))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def answers(answering: Answering) -> Callable[..., dict[str, Any]]:
    def run(folder: Path, cases: list[str], bundle: Path | None = None, **rest: Any) -> dict[str, Any]:
        entry = rest.pop("entry", {})
        checkpoint = rest.pop("checkpoint", None)
        process: Answering = rest.pop("process", answering)
        if bundle is not None:
            rest["additional_config"] = {"vlexport": {"bundle": str(bundle), "threads": 1, **entry}}
        job = {"set": str(folder), "cases": cases, "checkpoint": checkpoint and str(checkpoint)}
        return process.answer({**job, "options": rest})

    return run
