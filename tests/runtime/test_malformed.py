"""Every kind of bad request is refused with a typed error, and its neighbours in a batch do not change."""

from __future__ import annotations

from tests.runtime.made import IMAGE, image, prompt
from tests.runtime.malformed import malformed
from tests.runtime.test_requests import SHORT
from vlexport.errors import InternalError, VlexportError
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Request

BATCH = 30


def test_bad_requests_of_every_kind_are_refused_and_change_no_neighbour(answering: Pipeline) -> None:
    named = list(malformed())
    assert len(named) >= 130
    good = Request(raw_prompt=prompt(IMAGE, "what?"), images=[image(1)], generation=SHORT)
    alone = answering.generate(good).token_ids
    faults = []
    for start in range(0, len(named), BATCH):
        names, bad = zip(*named[start : start + BATCH], strict=True)
        first, *outcomes, last = answering.generate_all([good, *bad, good])
        assert isinstance(first, Answer)
        assert isinstance(last, Answer)
        assert first.token_ids == last.token_ids == alone
        faults += [
            f"{name}: {outcome!r}"
            for name, outcome in zip(names, outcomes, strict=True)
            if not isinstance(outcome, VlexportError) or isinstance(outcome, InternalError)
        ]
    assert faults == []
