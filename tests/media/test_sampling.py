"""Which frames are taken: the same as transformers takes at a constant rate, by time at any other."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlexport.errors import InputError
from vlexport.media.sampling import Sampling, Timeline, choose


def constant(total, rate=Fraction(30), *, tick=Fraction(1, 15360), first=0):
    step = 1 / rate / tick
    ticks = [first + round(number * step) for number in range(total)]
    return Timeline(ticks=ticks, tick=tick, declared_rate=Fraction(rate))


def milliseconds(*ticks, declared=None):
    return Timeline(ticks=ticks, tick=Fraction(1, 1000), declared_rate=declared)


def transformers_indices(total, rate, fps, *, least=4, most=768, multiple=2):
    """`sample_frames` of their video processor (5.23), which cannot be imported without torchvision."""
    most = math.floor(min(most, total) / multiple) * multiple
    num = min(max(total / rate * fps, least), most, total)
    num = math.floor(num / multiple) * multiple
    indices = torch.arange(0, total, total / num).int().tolist()
    # Float rounding adds an index past the end of the video in 4 % of the cases; nothing is decoded for it.
    return [index for index in indices if index < total]


@pytest.mark.seconds
@given(
    st.integers(2, 3000),
    st.sampled_from([1, 10, 24, 25, 30, 60, Fraction(24000, 1001), Fraction(30000, 1001)]),
    st.floats(0.05, 60),
)
def test_at_a_constant_rate_the_indices_are_those_of_transformers(total, rate, fps):
    choice = choose(constant(total, Fraction(rate)), Sampling(frames_per_second=fps))
    assert list(choice.indices) == transformers_indices(total, float(rate), fps)


@given(st.integers(2, 3000), st.integers(1, 60), st.floats(0.05, 60))
def test_the_rate_of_what_is_taken_is_its_count_over_the_length(total, rate, fps):
    choice = choose(constant(total, Fraction(rate)), Sampling(frames_per_second=fps))
    assert choice.frames_per_second == pytest.approx(len(choice.indices) / total * rate, rel=1e-12)


@given(st.integers(1, 400), st.floats(0.05, 60), st.integers(1, 9), st.integers(1, 30), st.integers(0, 60))
def test_counts_are_multiples_within_their_bounds(total, fps, multiple, least, more):
    sampling = Sampling(
        frames_per_second=fps, multiple=multiple, min_frames=least, max_frames=max(least + more, multiple)
    )
    num = sampling.count(total, 25.0)
    assert 1 <= num <= min(total, sampling.max_frames)
    assert num % multiple == 0 or total < multiple


def test_counts_follow_the_rate_between_their_bounds():
    choice = choose(constant(300), Sampling())
    assert (len(choice.indices), choice.frames_per_second) == (20, 2.0)
    # Short videos give the smallest count, long ones the largest at a lower rate.
    assert choose(constant(30), Sampling()).indices == (0, 7, 15, 22)
    choice = choose(constant(3000), Sampling(max_frames=100))
    assert (len(choice.indices), choice.frames_per_second) == (100, 1.0)
    # A video of fewer frames than a group stays whole; of a longer one at least a group is taken.
    assert choose(constant(1), Sampling()).indices == (0,)
    assert choose(constant(300), Sampling(frames_per_second=0.01, min_frames=1)).indices == (0, 150)
    single = Sampling(frames_per_second=1, multiple=1, min_frames=1)
    assert choose(constant(9, Fraction(3)), single).indices == (0, 3, 6)


def test_a_file_whose_clock_rounds_to_milliseconds_has_a_constant_rate():
    rounded = constant(300, tick=Fraction(1, 1000), first=7)
    assert rounded.is_constant
    assert choose(rounded, Sampling()).frames_per_second == 2.0


def test_at_a_variable_rate_the_frame_that_shows_at_each_time_is_taken():
    uneven = milliseconds(0, 100, 200, 1000, 1100, 1200, 2000, 2100, declared=Fraction(10))
    choice = choose(uneven, Sampling(frames_per_second=2))
    # 2.4 seconds long, so a frame every 0.6 seconds
    assert choice.indices == (0, 2, 5, 5)
    assert choice.frames_per_second == pytest.approx(4 / 2.4, rel=1e-12)
    assert choice.seconds == (0.0, 0.2, 1.2, 1.2)


@pytest.mark.parametrize("rate", [Fraction(25), Fraction(30000, 1001)])
def test_times_at_a_constant_rate_are_places_in_the_source_over_its_rate(rate):
    """As transformers' `VideoMetadata` has them, whatever the ticks of the file round to."""
    choice = choose(constant(300, rate, first=77), Sampling())
    assert choice.seconds == tuple(index / float(rate) for index in choice.indices)


def test_a_rate_that_lies_is_not_believed():
    lying = milliseconds(*range(0, 10_000, 100), declared=Fraction(1000))
    choice = choose(lying, Sampling(frames_per_second=1))
    assert choice.indices == tuple(range(0, 100, 10))
    assert choice.frames_per_second == pytest.approx(1.0)


def test_one_frame_without_a_rate_is_taken_without_a_rate():
    choice = choose(milliseconds(40), Sampling())
    assert (choice.indices, choice.frames_per_second) == ((0,), None)


def test_a_pause_before_the_first_frame_changes_nothing():
    assert choose(constant(60, first=9999), Sampling()) == choose(constant(60), Sampling())


def test_rates_that_are_none_and_bounds_that_contradict_each_other_are_refused(subtests):
    for rate in (0, -1, math.nan, math.inf):
        words = rf"frames.per.second: {rate} (\(float\) )?given"
        with subtests.test(rate), pytest.raises(InputError, match=words):
            Sampling(frames_per_second=rate)
    for bounds in ({"min_frames": 0}, {"min_frames": 9, "max_frames": 8}, {"multiple": 0}, {"multiple": 769}):
        words = "1 <= min <= max and 1 <= multiple <= max"
        with subtests.test(bounds), pytest.raises(InputError, match=words):
            Sampling(**bounds)  # type: ignore[arg-type]
