"""Which token comes next, and that no neighbour has an effect on it."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.runtime.recorded import recorded, with_generation
from vlexport.errors import InputError
from vlexport.runtime.generate import Sampler, allowed_shares
from vlexport.runtime.request import Generation

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -torch.inf]).clamp(min=-50)


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first():
    assert Sampler(Generation()).choose(LOGITS) == 1


def test_shares_are_the_softmax_where_nothing_is_left_out():
    shares = allowed_shares(LOGITS, Generation(temperature=0.5))
    torch.testing.assert_close(shares, (LOGITS.double() / 0.5).softmax(0))


def test_shares_are_those_of_transformers():
    """Temperature, then the likeliest, then the nucleus of what these leave; quarters lie on its border."""
    known = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0])
    rows = [(torch.zeros(4), 4), *((known, top_k) for top_k in (1, 3, 5))]
    settings = itertools.product((0.5, 1.0, 2.0), (0.25, 0.5, 0.75, 0.9), rows)
    for temperature, top_p, (logits, most) in settings:
        theirs = TemperatureLogitsWarper(temperature)(None, logits.double()[None])
        for warper in (TopKLogitsWarper(most), TopPLogitsWarper(top_p)):
            theirs = warper(None, theirs)
        ours = allowed_shares(logits, Generation(temperature=temperature, top_k=most, top_p=top_p))
        # Of equally likely ones at the cut as many, whichever.
        torch.testing.assert_close(ours.sort().values, theirs[0].softmax(0).sort().values)


def test_draws_follow_the_shares():
    sampler = Sampler(Generation(temperature=1.0, top_k=2, seed=3))
    drawn = [sampler.choose(LOGITS) for _ in range(400)]
    # Two equal shares: 400 draws leave 200 +- 50 to each with probability 1 - 5e-7.
    assert set(drawn) == {1, 3}
    assert 150 < drawn.count(1) < 250


def test_a_seed_repeats_its_draws_and_another_one_differs():
    def draws(seed):
        sampler = Sampler(Generation(temperature=2.0, seed=seed))
        return [sampler.choose(LOGITS) for _ in range(50)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_logits_that_are_no_numbers_are_refused():
    for bad in (torch.nan, torch.inf):
        with pytest.raises(InputError, match="NaN or infinite logits"):
            Sampler(Generation()).choose(torch.tensor([0.0, bad]))


@pytest.mark.seconds
def test_a_sampled_answer_is_the_same_alone_and_among_others(answering):
    request = with_generation(recorded("image_then_video").request, temperature=1.3, seed=7, ignore_end=True)
    other = with_generation(recorded("video_fps1").request, temperature=1.3, seed=9, ignore_end=True)
    alone = answering.generate(request)
    among = answering.generate_all([other, request, other])
    assert among[1].token_ids == alone.token_ids
    assert among[0].token_ids == among[2].token_ids != alone.token_ids


def test_a_greedy_choice_reads_two_numbers_and_not_the_row(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("the row of logits was copied"))
    assert Sampler(Generation()).choose(LOGITS) == 1
