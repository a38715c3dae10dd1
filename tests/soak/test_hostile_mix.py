"""Good requests among bad ones get the tokens that they get alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.mixture import SHARE, mix
from tests.thirty import cases
from vlexport.errors import VlexportError
from vlexport.runtime.decoder import Language
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import load

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]


@pytest.mark.parametrize(
    ("count", "batch"), [(60, 20), (cases("mixed requests") or 60, 50)], ids=["short", "long"]
)
def test_good_requests_among_hostile_ones_get_the_tokens_they_get_alone(
    bundles: Callable[[str], Path], language: Language, count: int, batch: int, record_property: Note
) -> None:
    record_property("mixed requests", count)
    mixture, is_bad = mix(count, SHARE, seed=count)
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
