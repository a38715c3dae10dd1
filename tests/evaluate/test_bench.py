"""Paired ratios and the order of rounds, on numbers whose answers are known."""

from vlexport.evaluate.bench import order_of
from vlexport.evaluate.intervals import paired


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
