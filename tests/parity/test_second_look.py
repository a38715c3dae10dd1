"""A ratio over its limit is measured again a rounding step away: accidents pass, faults stay, all noted."""

import math
from dataclasses import replace

import pytest
import torch

from tests.parity.test_no_false_alarm import forty
from tests.subjects import subject_of
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.backends import Engine, Runner, find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.parity.check import Checker
from vlexport.parity.limits import NUM_NEIGHBOURS, nudged, settled, step_of
from vlexport.parity.report import Row
from vlexport.parity.samples import Sample, random_items
from vlexport.specs import Precision, Quantisation
from vlexport.testing import in_torch

# Each of six tried puts two to four calls of the sliced tower in doubt; this one four.
SEED = 3
LIMITS = {"ratio": 1.5, "token_ratio": 3.0}


def row(ratio, token_ratio=1.0, shapes="mix", level="L2", **fields):
    metrics = {
        "relative_l2": 0.02 * ratio,
        "worst_token": 0.03 * token_ratio,
        "min_cosine": 1.0,
        "noise": 0.02,
        "token_noise": 0.03,
        "worst_at": 0,
        "ratio": ratio,
        "token_ratio": token_ratio,
    }
    given = {"metrics": metrics, "limits": LIMITS, "origin": "noise", **fields}
    return Row(level=level, check="embeds", shapes=shapes, **given)


class Neighbours:
    """Answers with the same rows for every sample, and keeps which were measured."""

    def __init__(self, rows):
        self.rows, self.looked = rows, []

    def __call__(self, shapes):
        self.looked.append(shapes)
        return self.rows


def settle(rows, *neighbours):
    look = Neighbours(list(neighbours))
    return list(settled(rows, look)), look.looked


def test_nothing_is_measured_again_where_nothing_is_in_doubt():
    rows = [row(1.4, 2.9), row(9.0, level="L3")]
    assert settle(rows) == (rows, [])


def test_an_accident_passes_and_notes_what_was_seen():
    (found,), looked = settle([row(1.6, 3.5)], *[row(1.0, 3.6)] * 2, row(1.1, 1.0))
    assert (found.verdict, looked) == ("failed", ["mix"])
    (found,), _ = settle([row(1.6, 2.0)], *[row(1.0)] * 3)
    assert found.verdict == "passed"
    assert found.metrics["ratio"] == pytest.approx(math.sqrt((1.6**2 + 3) / 4))
    assert found.metrics["token_ratio"] == pytest.approx(2.0)
    alone, together = found.note.split(", over 4 inputs a rounding step apart ")
    assert (alone, together) == ("alone 1.60 and 2.00 times the noise", "1.18 and 2.00")


def test_over_all_neighbours_less_is_allowed_than_for_one_call():
    (found,), _ = settle([row(1.6)], *[row(1.43)] * NUM_NEIGHBOURS)
    assert found.metrics["ratio"] == pytest.approx(1.444, abs=1e-3)
    assert (found.limits, found.verdict) == ({"ratio": 1.4, "token_ratio": 3.0}, "failed")


def test_a_token_is_held_against_the_worst_of_the_reference_on_all_inputs():
    fragile = row(1.0, metrics={**row(1.0).metrics, "token_noise": 0.06})
    (found,), _ = settle([row(1.0, 3.5)], row(1.0), fragile)
    assert found.metrics["token_ratio"] == pytest.approx(3.5 / 2)
    assert found.verdict == "passed"


def test_after_a_fault_that_is_certain_nothing_is_measured():
    rows = [row(1.6, shapes="one"), row(1.7, shapes="two"), row(1.2, shapes="three")]
    found, looked = settle(rows, row(1.6))
    assert ([each.verdict for each in found], looked) == (["failed", "failed", "passed"], ["one"])
    assert settle([row(1.6), row(4.6)], row(1.0))[1] == []
    assert settle([row(1.6, 9.1)], row(1.0))[1] == []
    assert settle([row(1.6), row(math.nan)], row(1.0))[1] == []
    assert settle([row(1.6), row(1.0, given="failed")], row(1.0))[1] == []
    assert settle([row(1.6), row(1.0, given="blocked")], row(1.0))[1] == []


def test_a_neighbour_that_cannot_be_measured_settles_nothing():
    for broken in (row(math.nan), row(1.0, given="failed", metrics={}, note="the output is missing")):
        (found,), _ = settle([row(1.6)], row(1.0), broken)
        assert found.verdict == "failed"
        assert found.note.startswith("mix: ")


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    """A tower of 32 columns, four tokens a slice: samples too small for one look."""
    folder = tmp_path_factory.mktemp("sliced") / "checkpoint"
    checkpoint = Checkpoint.open(write_tiny_minicpmv(folder, Tiny(version="2.0", with_decoder=False), seed=0))
    return subject_of(checkpoint, "bfloat16", backend=find_backend("eager"))


def test_neighbours_are_other_numbers_of_the_precision_and_no_further_than_its_next(sliced):
    items = random_items(sliced.recipe, sliced.config, [("image", (1, 4, 6))], seed=0)
    step = step_of(sliced)
    near = nudged(Sample(name="image", items=items), step)
    before = items[0].patches
    shares = torch.stack([each.items[0].patches for each in near]) / before - 1
    assert (len(near), len({each.digest() for each in near})) == (NUM_NEIGHBOURS, NUM_NEIGHBOURS)
    assert float(shares.abs().max()) <= step * 1.0001
    others = near[0].items[0].patches.bfloat16() != before.bfloat16()
    assert float(others.double().mean()) > 0.4
    assert near[0].items[0].grid == items[0].grid


def test_steps_follow_the_precision(sliced):
    scheme = Quantisation(name="int8", group=0, activations=0)
    int8 = replace(sliced, precision=Precision(quantisation=scheme), backend=None)
    assert (step_of(sliced), step_of(int8)) == (2**-7, 1 / 127)


class Otherwise(Runner):
    """As good as the tower: one in sixteen of its inputs is a step off, so it rounds otherwise. Or louder."""

    def __init__(self, engine, louder=0.0, seed=SEED):
        self.engine, self.louder = engine, louder
        self.generator = torch.Generator().manual_seed(seed)

    def run(self, tensors):
        patches = tensors["patches"].float()
        off = torch.rand(patches.shape, generator=self.generator) < 1 / 16
        outputs = self.engine.run({**tensors, "patches": (patches * (1 + 2**-7 * off)).bfloat16()})
        return {name: self._spoilt(rows.float()).to(rows.dtype) for name, rows in outputs.items()}

    def _spoilt(self, rows):
        noise = torch.randn(rows.shape, generator=self.generator)
        return rows + self.louder * noise * rows.pow(2).mean().sqrt()


def judged(subject, **options):
    with in_torch(subject) as engine:
        climb = Checker(Engine(Otherwise(engine, **options), engine.spec), forty(subject), lambda *_: None)
        climb.run_samples()
        return [each for each in climb.dtype() if each.level == "L2"]


@pytest.mark.seconds
def test_a_program_that_rounds_otherwise_passes_though_single_calls_are_over_the_limit(sliced):
    rows = judged(sliced)
    assert {each.verdict for each in rows} == {"passed"}
    assert any("alone" in each.note for each in rows)


@pytest.mark.seconds
def test_a_program_that_loses_twice_as_much_fails(sliced):
    assert "failed" in {each.verdict for each in judged(sliced, louder=0.05)}
