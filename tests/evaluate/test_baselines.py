"""Baselines: as many tokens as EVS, by place and seed alone, and in no bundle."""

import pytest
import torch

from vlexport.errors import UnsupportedError
from vlexport.evaluate.baselines import BASELINES
from vlexport.pruning.evs import EVS, prune
from vlexport.pruning.methods import find_method
from vlexport.pruning.selectors import eager

FRAMES, PER_FRAME = 6, 20
EMBEDS = torch.randn(FRAMES * PER_FRAME, 8, generator=torch.Generator().manual_seed(0))


def kept(name, seed, rate=0.5, embeds=EMBEDS):
    """Kept places of a video of 6 frames of 4 x 5 tokens."""
    return prune(embeds, (FRAMES, 4, 5), 1, rate, eager(BASELINES[name](seed=seed))).kept


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_keeps_as_many_tokens_as_evs_whatever_they_hold_and_others_by_another_seed(name):
    for rate in (0.1, 0.5, 0.8, 0.95):
        count = len(prune(EMBEDS, (FRAMES, 4, 5), 1, rate, EVS).kept)
        assert len(kept(name, 0, rate)) == count
        assert torch.equal(kept(name, 0, rate), kept(name, 0, rate, EMBEDS.flip(0).bfloat16()))
    assert not torch.equal(kept(name, 0), kept(name, 1))


def test_random_keeps_every_token_equally_often():
    times = torch.zeros(FRAMES * PER_FRAME)
    for seed in range(100):
        times[kept("random", seed)] += 1
    # Binomial with 100 trials of a half: a standard deviation of 5. One of 120 tokens passes five of them in
    # one of 15,000 runs; the seeds are fixed.
    assert (times - 50).abs().max() < 25
    # The variance of 120 tokens sums to 120 * 100 / 4, with a standard deviation of 3000 * sqrt(2 / 120) =
    # 387: half is just under four of these.
    assert (times - 50).square().sum() == pytest.approx(3000, rel=0.5)


def test_uniform_keeps_tokens_at_no_more_than_three_distances_and_the_same_share_of_every_frame():
    for seed in range(5):
        for rate in (0.2, 0.5, 0.7):
            places = kept("uniform", seed, rate)
            distances = places.diff().unique().tolist()
            # The three-gap theorem: the largest distance is the sum of the two others.
            assert len(distances) <= 3
            assert len(distances) < 3 or distances[2] == distances[0] + distances[1]
            by_frame = torch.bincount(places // PER_FRAME, minlength=FRAMES)
            # Places of a frame that are kept, of 20 in a row: the discrepancy of the golden ratio is below 2.
            assert (by_frame - PER_FRAME * (1 - rate)).abs().max() < 2


def test_no_bundle_is_built_with_a_baseline():
    for name in BASELINES:
        with pytest.raises(UnsupportedError, match=f"no pruning method '{name}'. There are: evs, evs-snap"):
            find_method(name)
