"""The same again: runs of a bundle in several processes, and a build made twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.recorded import CHECKPOINT
from tests.thirty import ROOT, cases
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.bundle import MANIFEST_NAME
from vlexport.checkpoint import Checkpoint

pytestmark = pytest.mark.slow
NUM_PROCESSES = 5
RUNS = """
import hashlib, sys
from tests.runtime.made import image, video
from vlexport.runtime.pipeline import load

with load(sys.argv[1]) as pipeline:
    for _ in range(int(sys.argv[2])):
        pipeline.encoder.cache.clear()
        found = pipeline.encode([image(1), video(2), image(3, 140, 84)])
        print(hashlib.sha256(b"".join(each.embeds.numpy().tobytes() for each in found)).hexdigest())
"""


def digests(bundle: Path, count: int) -> list[str]:
    """Return the digest of the embeddings of each run, in a process of its own."""
    words = [sys.executable, "-c", RUNS, str(bundle), str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    return ran.stdout.split()


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_runs_of_a_bundle_in_five_processes_give_the_same_bits(
    bundles: Callable[[str], Path], backend: str, record_property: Callable[[str, object], None]
) -> None:
    each_runs = max(1, cases("runs in 5 processes") // NUM_PROCESSES)
    found = [each for _ in range(NUM_PROCESSES) for each in digests(bundles(backend), each_runs)]
    assert len(found) == NUM_PROCESSES * each_runs
    assert len(set(found)) == 1
    record_property("runs in 5 processes", len(found))


def contents(bundle: Path) -> dict[str, bytes]:
    return {str(path.relative_to(bundle)): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino"])
def test_a_build_made_twice_differs_where_the_page_says(backend: str, tmp_path: Path) -> None:
    made = []
    for name in ("first", "second"):
        spec = request(Checkpoint.open(CHECKPOINT), backend=backend, into=tmp_path / name)
        made.append(build_checkpoint(spec).require_passed().path)
    first, second = map(contents, made)
    assert first.keys() == second.keys()
    differing = {name for name in first if first[name] != second[name]}
    print(f"{backend}: {sorted(differing)}")
    assert differing <= {MANIFEST_NAME, "card.md"}
    for found in (manifests := [json.loads(each[MANIFEST_NAME]) for each in (first, second)]):
        del found["created"], found["files"]["card.md"]
    assert manifests[0] == manifests[1]
