"""Nothing grows: memory, descriptors and threads over hundreds of requests of dozens of sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden_data import FOLDER
from tests.soak.endurance import Reading, slope

CHECKPOINT = FOLDER / "e2e" / "checkpoint"
ROOT = Path(__file__).parents[2]
KIBI = 2**10


@pytest.fixture
def bundle(bundles: Callable[[str], Path]) -> Path:
    return bundles("onnxruntime")


def readings(bundle: Path, count: int, num_shapes: int) -> list[Reading]:
    """After a tenth of the requests, of a process of its own: nothing of other tests is measured."""
    words = [sys.executable, "-m", "tests.soak.endurance", bundle, CHECKPOINT, count, num_shapes]
    # Left alone, glibc raises both limits as blocks are freed, and the heap then grows by fragments for a
    # thousand requests (10 MiB in all) while what is allocated stays the same to 32 KiB.
    fixed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env={**os.environ, **fixed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = [Reading(**each) for each in json.loads(ran.stdout)]
    return found[len(found) // 10 :]


def test_a_hundred_requests_leave_descriptors_and_threads_as_they_are(bundle: Path) -> None:
    found = readings(bundle, 100, 60)
    assert len({(each.descriptors, each.threads) for each in found}) == 1
    # A request's own media are 60 to 1,000 KiB; the cache, up to 256 KiB, is what goes up and down here.
    assert slope([each.allocated for each in found]) < 4 * KIBI


@pytest.mark.slow
def test_two_thousand_requests_leave_memory_flat(bundle: Path) -> None:
    found = readings(bundle, 2000, 60)[500:]
    assert len({(each.descriptors, each.threads) for each in found}) == 1
    assert slope([each.allocated for each in found]) < KIBI
    assert slope([each.resident for each in found]) < KIBI
