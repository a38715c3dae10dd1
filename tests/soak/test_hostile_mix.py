"""Good requests among bad ones get the tokens that they get alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.mixture import SHARE, is_refused, mix
from tests.thirty import cases
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
    refused = equal = 0
    with (
        load(bundles("onnxruntime"), decoder=language) as mixed,
        load(bundles("onnxruntime"), decoder=language) as alone,
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
