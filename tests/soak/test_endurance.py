"""Nothing grows over hundreds of requests; good ones among bad get their tokens; runs are the same again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.recorded import CHECKPOINT
from tests.soak.endurance import Reading, slope
from tests.soak.mixture import SHARE, is_refused, mix
from tests.thirty import ROOT, cases
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.bundle import MANIFEST_NAME
from vlexport.checkpoint import Checkpoint
from vlexport.runtime.decoder import Language
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import load

pytestmark = pytest.mark.slow
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
@pytest.mark.parametrize(
    ("count", "warm_up", "most", "resident"),
    [(100, 10, 4 * KIBI, None), (500, 100, KIBI, None), (6000, 4000, KIBI, KIBI)],
)
def test_requests_leave_memory_descriptors_and_threads_as_they_are(bundle, count, warm_up, most, resident):
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
def test_prompts_of_new_lengths_in_bfloat16_leave_memory_as_it_is(bundle: Path) -> None:
    found = readings(bundle, 300, 60, dtype="bfloat16")[100:]
    print(account(found))
    assert slope([each.allocated for each in found]) < 4 * KIBI


# The short form warms up with the first 300 of its 500: every shape has its first call there.
@pytest.mark.parametrize("backend", ["onnxruntime", "eager"])
def test_eight_threads_over_two_hundred_shapes_leave_the_process_as_it_is(bundles, backend, record_property):
    count = cases("requests of the soak")
    found = readings(bundles(backend), count, 200, num_threads=8)[max(3, count // 1000) :]
    print(backend, account(found, step=100))
    assert len(handles(found)) == 1
    if count >= 10_000:
        require_flat(found)
    record_property("requests of the soak", count)


def test_an_hour_of_hostile_requests_harms_no_other_and_leaves_the_process_as_it_is(bundle, record_property):
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


def test_an_hour_of_frames_a_fifth_of_them_hostile_leaves_the_process_as_it_is(
    bundle, tmp_path, record_property
):
    minutes, decoder = cases("minutes of frames"), tmp_path / "decoder"
    # An hour has 7,200 positions, the checkpoint 4,096.
    shutil.copytree(CHECKPOINT, decoder)
    config = json.loads((decoder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 16_384
    (decoder / "config.json").write_text(json.dumps(config))
    ran = printed("streaming", bundle, decoder, minutes, num_threads=2)
    found = [Reading(**each) for each in ran["readings"]]
    assert ran["taken"] == 120 * minutes == 120 * len(found)
    assert ran["refused"] > 0.2 * ran["taken"]
    # Two minutes fill what the stream may hold.
    found = found[3:]
    if minutes >= 60:
        print(f"{ran['taken']} frames, {ran['refused']} refused;", account(found, step=120))
        assert len(handles(found)) == 1
        require_flat(found)
    record_property("minutes of frames", minutes)


@pytest.mark.parametrize(
    ("count", "batch"), [(60, 20), (cases("mixed requests") or 60, 50)], ids=["short", "long"]
)
def test_good_requests_among_hostile_ones_get_the_tokens_they_get_alone(
    bundles: Callable[[str], Path],
    language: Language,
    count: int,
    batch: int,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("mixed requests", count)
    refused = equal = 0
    with (
        load(bundles("onnxruntime"), checkpoint=language) as mixed,
        load(bundles("onnxruntime"), checkpoint=language) as alone,
    ):
        for start in range(0, count, batch):
            requests, is_bad = mix(batch, SHARE, seed=start)
            outcomes = mixed.generate_all(requests)
            refused_ones = [is_refused(*pair) for pair in zip(outcomes, requests, strict=True)]
            assert refused_ones == is_bad
            for request, outcome in zip(requests, outcomes, strict=True):
                if isinstance(outcome, Answer):
                    assert alone.generate(request).token_ids == outcome.token_ids
                    equal += 1
            refused += sum(is_bad)
    print(f"{count} requests: {refused} refused, {equal} answers as alone")
    assert refused + equal == count
    assert refused > 0.1 * count


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
    words = [sys.executable, "-c", RUNS, str(bundle), str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    return ran.stdout.split()


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_runs_of_a_bundle_in_five_processes_give_the_same_bits(bundles, backend, record_property):
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
        spec = request(Checkpoint.open(CHECKPOINT), backend=backend, output_dir=tmp_path / name)
        made.append(build_checkpoint(spec).require_passed().path)
    first, second = map(contents, made)
    assert first.keys() == second.keys()
    differing = {name for name in first if first[name] != second[name]}
    print(f"{backend}: {sorted(differing)}")
    assert differing <= {MANIFEST_NAME, "card.md"}
    for found in (manifests := [json.loads(each[MANIFEST_NAME]) for each in (first, second)]):
        del found["created"], found["files"]["card.md"]
    assert manifests[0] == manifests[1]
