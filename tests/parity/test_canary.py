"""A check that looks at nothing, or at too little, is no check: it fails by itself."""

from dataclasses import replace

import pytest
import torch

from tests.changed_recipes import with_few_mixes
from tests.mutation.judge import silent
from vlexport.parity import samples as sampling
from vlexport.parity.canary import CANARY
from vlexport.parity.check import Checker
from vlexport.testing import in_torch


def small(subject):
    """Two shape sets are enough to see whether a check can fail."""
    return replace(subject, recipe=with_few_mixes(subject.recipe, subject.config))


def canary_of(subject):
    with in_torch(subject) as engine:
        rows = list(Checker(engine, small(subject), silent).structure())
    (row,) = [row for row in rows if row.check == CANARY]
    return row


@pytest.mark.thirty("results that are none", 1)
def test_wrong_answers_are_refused_in_every_check(subject_of):
    row = canary_of(subject_of())
    assert row.verdict == "passed"
    assert row.note == "2 kinds"


def test_a_check_that_never_looks_at_the_engine_fails(subject_of, monkeypatch):
    subject = subject_of()
    tower, answers_to = subject.tower(), Checker.answers_to

    def own(self, samples):
        for answer, sample in zip(answers_to(self, samples), samples, strict=True):
            inputs = subject.recipe.prepare(subject.config, sample.items, subject.form)
            with torch.inference_mode():
                yield replace(answer, outputs=tower(inputs), error="")

    monkeypatch.setattr(Checker, "answers_to", own)
    row = canary_of(subject)
    assert row.verdict == "failed"
    assert row.metrics["wrong"] == 2


def test_constant_pixels_fail(subject_of, monkeypatch):
    monkeypatch.setattr(sampling, "_rows", lambda rows, width, _: torch.full((rows, width), 0.5))
    subject = subject_of()
    with in_torch(subject) as engine:
        rows = list(Checker(engine, small(subject), silent).integers())
    assert [row.check for row in rows if row.verdict == "failed"] == ["samples"]
