"""Paired ratios and slopes on numbers whose answers are known."""

import pytest

from vlexport.bench.ratios import interval, log_slope, paired


def test_a_ratio_is_taken_round_by_round_so_that_slow_rounds_cancel():
    ratio = paired([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_an_interval_spans_what_five_rounds_can_say():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.median == 3.0
    # A median of five draws is an extreme value with probability 0.058 on each side, the next one with 0.32.
    assert (found.low, found.high) == (1.0, 5.0)


def test_an_interval_is_the_same_every_time():
    assert interval([1.0, 1.5, 0.7, 2.0]) == interval([1.0, 1.5, 0.7, 2.0])


def test_a_slope_is_the_exponent_of_growth():
    sizes = [256.0, 512.0, 1024.0, 2048.0]
    assert log_slope(sizes, [3e-4 * size**1.5 for size in sizes]) == pytest.approx(1.5, rel=1e-12)


def test_one_outlier_does_not_move_a_slope_of_five_sizes_to_that_of_a_square():
    sizes = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert log_slope(sizes, [1.0, 2.0, 12.0, 8.0, 16.0]) == pytest.approx(1.0, abs=0.1)
