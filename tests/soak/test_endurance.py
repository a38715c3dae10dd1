"""Nothing grows: memory, descriptors and threads over hundreds of requests of dozens of sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden_data import FOLDER
from tests.soak.endurance import Reading, slope
from tests.thirty import cases

CHECKPOINT = FOLDER / "e2e" / "checkpoint"
ROOT = Path(__file__).parents[2]
KIBI, MEBI = 2**10, 2**20


@pytest.fixture
def bundle(bundles: Callable[[str], Path]) -> Path:
    return bundles("onnxruntime")


def printed(module: str, *words: object, num_threads: int = 1) -> Any:
    """What a module prints as JSON, in a process of its own: nothing of other tests is measured."""
    # Left alone, glibc raises both limits as blocks are freed, and the heap then grows by fragments for a
    # thousand requests (10 MiB in all) while what is allocated stays the same to 32 KiB.
    fixed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    if num_threads > 1:
        # What malloc has given out is counted in the first arena alone.
        fixed["MALLOC_ARENA_MAX"] = "1"
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.soak.{module}", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **fixed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def readings(
    bundle: Path, count: int, num_shapes: int, *, num_threads: int = 1, dtype: str = "float32"
) -> list[Reading]:
    """After each request, or with threads after a hundred; `dtype` is the decoder's."""
    words = (bundle, CHECKPOINT, dtype, count, num_shapes, num_threads)
    return [Reading(**each) for each in printed("endurance", *words, num_threads=num_threads)]


def handles(found: list[Reading]) -> set[tuple[int, int]]:
    """Every pair of open descriptors and threads that was seen."""
    return {(each.descriptors, each.threads) for each in found}


def account(found: list[Reading], step: int = 1) -> str:
    """What `make soak` shows of a run after its warm-up."""
    first, last = found[0], found[-1]
    grown = [slope(each) / step for each in ([r.resident for r in found], [r.allocated for r in found])]
    return (
        f"{step * len(found)} requests after warm-up: resident {first.resident / MEBI:.1f} to "
        f"{last.resident / MEBI:.1f} MiB, {grown[0]:+.0f} bytes a request; given out by malloc "
        f"{grown[1]:+.0f} bytes a request; descriptors and threads {sorted(handles(found))}"
    )


# Requests, and how many warm up. A request's own media are 60 to 1,000 KiB; of a hundred, the cache, up to
# 256 KiB, is what goes up and down. 60 shapes by frames, rates and chunks are some 600 kinds of requests;
# libraries remember every new one, and what malloc has given out grows by 366 bytes a request up to the
# 2,000th, then by less and less: resident memory is judged behind that.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "warm_up", "most", "resident"),
    [(100, 10, 4 * KIBI, None), (500, 100, KIBI, None), (6000, 4000, KIBI, KIBI)],
)
def test_requests_leave_memory_descriptors_and_threads_as_they_are(
    bundle: Path, count: int, warm_up: int, most: int, resident: int | None
) -> None:
    found = readings(bundle, count, 60)[warm_up:]
    print(account(found))
    assert len(handles(found)) == 1
    assert slope([each.allocated for each in found]) < most
    if resident is not None:
        assert slope([each.resident for each in found]) < resident


def require_flat(found: list[Reading]) -> None:
    """Readings, one for a hundred requests, grow by less than a KiB a request and 2 % in all."""
    assert slope([each.allocated for each in found]) < 100 * KIBI
    assert max(each.resident for each in found[-20:]) < 1.02 * max(each.resident for each in found[:20])


# oneDNN multiplies bfloat16 on every processor, and has products of their own for every length of a prompt.
@pytest.mark.slow
def test_prompts_of_new_lengths_in_bfloat16_leave_memory_as_it_is(bundle: Path) -> None:
    found = readings(bundle, 300, 60, dtype="bfloat16")[100:]
    print(account(found))
    assert slope([each.allocated for each in found]) < 4 * KIBI


# The short form warms up with the first 300 of its 500: every shape has its first call there.
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "eager"])
def test_eight_threads_over_two_hundred_shapes_leave_the_process_as_it_is(
    bundles: Callable[[str], Path], backend: str, record_property: Callable[[str, object], None]
) -> None:
    count = cases("requests of the soak")
    found = readings(bundles(backend), count, 200, num_threads=8)[max(3, count // 1000) :]
    print(backend, account(found, step=100))
    assert len(handles(found)) == 1
    if count >= 10_000:
        require_flat(found)
    record_property("requests of the soak", count)


@pytest.mark.slow
def test_an_hour_of_hostile_requests_harms_no_other_and_leaves_the_process_as_it_is(
    bundle: Path, record_property: Callable[[str, object], None]
) -> None:
    minutes = cases("minutes of hostile mix") or 1
    ran = printed("mixture", bundle, CHECKPOINT, minutes, num_threads=2)
    found = [Reading(**each) for each in ran["readings"]]
    found = found[len(found) // 10 :]
    print(
        f"{minutes} minutes: {ran['refused']} refused, {ran['answered']} answered as alone;",
        account(found, step=100),
    )
    assert ran["refused"] > 0.1 * ran["answered"] > 0
    assert len(handles(found)) == 1
    if minutes >= 60:
        require_flat(found)
    record_property("minutes of hostile mix", minutes)
