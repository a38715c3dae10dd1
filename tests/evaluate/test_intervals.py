"""Intervals of shares, means and ratios, against published and exact ones, and the order of rounds."""

import numpy as np
import pytest

from vlexport.evaluate.bench import order_of
from vlexport.evaluate.intervals import Estimate, means, paired, unpaired, wilson

# Newcombe, Statistics in Medicine 17 (1998), table I: method 3, score without continuity correction.
PUBLISHED = {
    (81, 263): (0.2553, 0.3662),
    (15, 148): (0.0624, 0.1605),
    (0, 20): (0.0, 0.1611),
    (1, 29): (0.0061, 0.1718),
}


def test_wilsons_interval_is_the_published_one_and_stays_between_0_and_1():
    for (right, total), bounds in PUBLISHED.items():
        found = wilson(right, total)
        assert found.value == right / total
        assert (found.low, found.high) == pytest.approx(bounds, abs=5e-5)
    mirrored = wilson(20, 20)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    assert mirrored.high is not None
    assert mirrored.high <= 1.0


def test_the_interval_of_a_mean_holds_95_of_100_resampled_means():
    # Sums of 10 of as many zeros as ones are binomial: 1.1 % are below 2, 5.5 % below 3.
    mixed, same = means([[0.0] * 5 + [1.0] * 5, [0.25] * 10])
    assert mixed == Estimate(value=0.5, low=0.2, high=0.8)
    assert same == Estimate(value=0.25, low=0.25, high=0.25)


def test_the_interval_of_a_mean_of_many_is_that_of_a_normal_distribution():
    values = [((7 * number) % 100) / 100 for number in range(400)]
    (found,) = means([values])
    # Uniform in hundredths: a standard deviation of 0.288661. Of 10,000 draws a bound has 1.4 % of noise.
    reach = 1.96 * 0.288661 / 20
    assert found.low == pytest.approx(found.value - reach, abs=0.05 * reach)
    assert found.high == pytest.approx(found.value + reach, abs=0.05 * reach)


def test_few_values_have_a_mean_and_no_interval():
    assert means([[1.0] * 9]) == [Estimate(value=1.0, low=None, high=None)]
    assert means([[0.5]])[0].text(100) == "50.0"
    assert wilson(9, 10).text(100) == "90.0 (59.6 to 98.2)"


@pytest.mark.slow
def test_the_interval_of_two_runs_holds_the_true_ratio_as_often_as_it_claims():
    found = 0
    for seed in range(100):
        source = np.random.default_rng(seed)
        over, under = (scale * source.lognormal(0.0, 0.1, 11) for scale in (1.25, 1.0))
        interval = unpaired(over.tolist(), under.tolist())
        assert interval.median == pytest.approx(np.median(over) / np.median(under))
        found += interval.low <= 1.25 <= interval.high
    # 93 measured; 95 are meant.
    assert found >= 90


def test_a_ratio_is_taken_round_by_round_so_that_slow_rounds_cancel():
    ratio = paired([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_an_interval_spans_what_five_rounds_can_show():
    found = paired([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert found.median == 3.0
    # A median of five draws is an extreme value with probability 0.058 on each side, the next one with 0.32.
    assert (found.low, found.high) == (1.0, 5.0)


def test_a_round_goes_back_the_way_the_one_before_came():
    names = ["a", "b", "c", "d", "e"]
    assert order_of(names, 3) == order_of(names, 2)[::-1]
    assert sorted(order_of(names, 0)) == names
    assert order_of(names, 0) != order_of(names, 2)
