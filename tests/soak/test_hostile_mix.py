"""Good requests among bad ones get the tokens that they get alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.test_outcomes import hostile
from tests.runtime.test_requests import HOSTILE
from tests.soak.endurance import requests
from tests.thirty import cases
from vlexport.errors import VlexportError
from vlexport.runtime.decoder import Language
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import load

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]


def mix(count: int, share: float, seed: int) -> tuple[list, list[bool]]:
    """So many requests, that share of them hostile, in no order."""
    drawn = random.Random(seed)
    # Those that are refused where they are made come past that check, as by a hole in it.
    bad = [*(request for request, _, _ in HOSTILE.values()), *hostile()]
    is_bad = [drawn.random() < share for _ in range(count)]
    good = iter(requests(count, 60, seed))
    return [drawn.choice(bad) if each else next(good) for each in is_bad], is_bad


@pytest.mark.parametrize(
    ("count", "batch"), [(60, 20), (cases("mixed requests") or 60, 50)], ids=["short", "long"]
)
def test_good_requests_among_hostile_ones_get_the_tokens_they_get_alone(
    bundles: Callable[[str], Path], language: Language, count: int, batch: int, record_property: Note
) -> None:
    record_property("mixed requests", count)
    mixture, is_bad = mix(count, 0.2, seed=count)
    with load(bundles("onnxruntime"), decoder=language) as mixed:
        outcomes = [
            outcome
            for start in range(0, count, batch)
            for outcome in mixed.generate_all(mixture[start : start + batch])
        ]
    assert [isinstance(outcome, VlexportError) for outcome in outcomes] == is_bad
    with load(bundles("onnxruntime"), decoder=language) as alone:
        equal = [
            alone.generate(request).token_ids == outcome.token_ids
            for request, outcome in zip(mixture, outcomes, strict=True)
            if isinstance(outcome, Answer)
        ]
    print(f"{count} requests: {sum(is_bad)} refused, {sum(equal)} of {len(equal)} answers as alone")
    assert all(equal)
