"""A check that looks at nothing, or at too little, is no check: it fails by itself."""

from dataclasses import replace

import pytest
import torch

from tests import subjects
from tests.changed_recipes import with_few_mixes, with_mixes
from tests.mutation.judge import silent
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.parity import limits
from vlexport.parity import samples as sampling
from vlexport.parity.canary import CANARY, canary_row
from vlexport.parity.check import Checker
from vlexport.parity.metrics import Metrics, compare
from vlexport.parity.reference import ReferenceOutput, ReferenceOutputs
from vlexport.specs import MediaBounds
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
    assert row.note == "8 kinds"


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
    assert row.metrics["unseen"] == 7


@pytest.mark.parametrize("metric", ["relative_l2", "worst_token"])
def test_a_metric_that_is_always_small_fails(subject_of, monkeypatch, metric):
    def blind(given, wanted):
        found = compare(given, wanted)
        return replace(found, **{metric: 0.0}) if isinstance(found, Metrics) else found

    monkeypatch.setattr(limits, "compare", blind)
    assert canary_of(subject_of()).verdict == "failed"


def test_constant_pixels_fail(subject_of, monkeypatch):
    monkeypatch.setattr(sampling, "_rows", lambda rows, width, _: torch.full((rows, width), 0.5))
    subject = subject_of()
    with in_torch(subject) as engine:
        rows = list(Checker(engine, small(subject), silent).integers())
    assert [row.check for row in rows if row.verdict == "failed"] == ["samples"]


def test_rows_are_exchanged_in_a_call_that_tells_them_apart(tmp_path):
    """Queries that look at one patch give equal rows; every call of one slice has as many."""
    checkpoint = Checkpoint.open(write_tiny_minicpmv(tmp_path, Tiny(version="2.6", with_decoder=False)))
    subject = subjects.subject_of(checkpoint)
    bounds = MediaBounds(max_pixels=56 * 56, max_images=1)
    one_slice = subject.recipe.packing(subject.config).profile("custom", bounds)
    mixes = {name: [("image", (1, 1, columns))] for name, columns in (("one patch", 1), ("a line", 6))}
    subject = replace(subject, recipe=with_mixes(subject.recipe, mixes), profile=one_slice)
    with in_torch(subject) as engine:
        engine.spec = replace(engine.spec, profile=one_slice)
        rows = list(Checker(engine, subject, silent).structure())
    (row,) = [row for row in rows if row.check == CANARY]
    assert (row.verdict, row.note) == ("passed", "8 kinds")
    assert row.shapes != "one patch"


@pytest.mark.parametrize("rows", [1, 4])
def test_where_a_call_has_one_row_again_and_again_no_order_is_tried(rows):
    right = torch.linspace(1, 2, 8).repeat(rows, 1)
    wanted = right * (1 + 1e-6)
    floor = {"embeds": compare(right, wanted)}
    truth = ReferenceOutput(digest="", outputs={"embeds": wanted}, narrow={}, floor=floor)

    def again(name, given):
        return [limits.Answer(sample=name, digest="", outputs=given)]

    def judge(answers, truths):
        return limits.structure_rows(answers, truths, limits.BLOCK_LIMIT)

    row = canary_row(
        ReferenceOutputs(of={"only": truth}, blocks={}), again("only", {"embeds": right}), again, judge
    )
    assert (row.verdict, row.note) == ("passed", "5 kinds")
