"""Good requests among hostile ones, for so many minutes in one process, and what that held meanwhile."""

from __future__ import annotations

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from tests.runtime.test_outcomes import hostile
from tests.runtime.test_requests import HOSTILE
from tests.soak.endurance import OPTIONS, Reading, largest, reading, requests
from vlexport.errors import VlexportError
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Request

SHARE = 0.2
NUM_GOOD, NUM_SHAPES, BATCH, NUM_THREADS = 600, 60, 50, 2


def bad_requests() -> list[Request]:
    """Those that are refused where they are made come past that check, as by a hole in it."""
    return [*(request for _, request, _ in HOSTILE.values()), *hostile()]


def is_refused(outcome: object, request: Request) -> bool:
    """Return whether a bad request has its own error; a bug of the library may be met behind a hole alone."""
    own = next((kind for kind, known, _ in HOSTILE.values() if known is request), VlexportError)
    return isinstance(outcome, own)


def mix(count: int, share: float, seed: int) -> tuple[list[Request], list[bool]]:
    """So many requests, that share of them hostile, in no order."""
    drawn, bad = random.Random(seed), bad_requests()
    is_bad = [drawn.random() < share for _ in range(count)]
    good = iter(requests(count, NUM_SHAPES, seed))
    return [drawn.choice(bad) if each else next(good) for each in is_bad], is_bad


def endure(pipeline: Pipeline, minutes: float) -> tuple[int, int, list[Reading]]:
    """Return how many were refused and answered, all of them rightly, and readings every hundred requests."""
    good, bad, drawn = requests(NUM_GOOD, NUM_SHAPES, seed=1), bad_requests(), random.Random(2)
    expected = [pipeline.generate(each).token_ids for each in good]
    refused, answered, readings = 0, 0, []

    def run(places: list[int | None]) -> tuple[int, int]:
        batch = [drawn.choice(bad) if place is None else good[place] for place in places]
        outcomes = pipeline.generate_all(batch)
        for place, request, outcome in zip(places, batch, outcomes, strict=True):
            if place is None:
                assert is_refused(outcome, request), outcome
            else:
                assert isinstance(outcome, Answer), outcome
                assert outcome.token_ids == expected[place]
        return places.count(None), len(places) - places.count(None)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(pipeline.generate, [largest(NUM_SHAPES)] * NUM_THREADS))
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            batches = [
                [None if drawn.random() < SHARE else drawn.randrange(NUM_GOOD) for _ in range(BATCH)]
                for _ in range(NUM_THREADS)
            ]
            for one, other in threads.map(run, batches):
                refused, answered = refused + one, answered + other
            readings.append(reading())
    return refused, answered, readings


def main(bundle: str, decoder: str, minutes: str) -> None:
    torch.set_num_threads(1)
    with load(Path(bundle), checkpoint=decoder, runtime=OPTIONS) as pipeline:
        refused, answered, found = endure(pipeline, float(minutes))
    readings = [asdict(each) for each in found]
    json.dump({"refused": refused, "answered": answered, "readings": readings}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
