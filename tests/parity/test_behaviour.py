"""Answers of a decoder on both sides: verdicts only where there is enough to judge."""

import math

import pytest
import torch

from vlexport.parity.behaviour import Answers, behaviour_row, divergence, first_divergence


def logits(positions=100, prompts=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [5 * torch.randn(positions, 32, generator=generator) for _ in range(prompts)]


def row(candidate, *, reference=None, random_weights=False, dtype="float32"):
    answers = Answers(
        reference=logits() if reference is None else reference,
        candidate=candidate,
        random_weights=random_weights,
    )
    return behaviour_row(answers, dtype, "3 prompts")


def nudged(size):
    generator = torch.Generator().manual_seed(1)
    return [each + size * torch.randn(each.shape, generator=generator) for each in logits()]


def test_answers_that_agree_pass():
    found = row(nudged(1e-6))
    assert found.verdict == "passed"
    assert found.metrics["positions"] == 300
    assert found.metrics["disagreement"] == 0


def test_answers_that_differ_fail():
    assert row(nudged(1.0)).verdict == "failed"


def test_a_smaller_type_has_wider_limits():
    near = nudged(0.03)
    assert row(near).verdict == "failed"
    assert row(near, dtype="bfloat16").verdict == "passed"


def test_random_weights_give_no_verdict():
    found = row(nudged(1e-6), random_weights=True)
    assert (found.verdict, found.note) == ("observed", "no verdict: random weights")


def test_fewer_than_200_positions_give_no_verdict():
    few = logits(positions=66)
    found = row([each.clone() for each in few], reference=few)
    assert (found.verdict, found.note) == ("observed", "no verdict: fewer than 200 positions")


def test_a_dtype_without_limits_is_blocked():
    assert row(nudged(1e-6), dtype="int8").verdict == "blocked"


@pytest.mark.parametrize(
    "candidate",
    [
        [],
        logits(prompts=2),
        logits(positions=99),
        [each * math.nan for each in logits()],
        [each[:0] for each in logits()],
    ],
    ids=["none", "fewer answers", "shorter answers", "nan", "empty"],
)
def test_answers_that_cannot_be_compared_fail(candidate):
    assert row(candidate).verdict == "failed"


def test_divergence_of_equal_distributions_is_zero_and_grows_with_difference():
    one = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    other = torch.tensor([[3.0, 3.0], [0.0, math.log(3.0)]])
    near, far = divergence(one, other).tolist()
    assert near == pytest.approx(0.0, abs=1e-12)
    assert far == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))


def test_the_first_divergence_is_where_greedy_answers_part():
    assert first_divergence(torch.tensor([True, True, False, True])) == 2
    assert first_divergence(torch.tensor([True, True])) == 2
