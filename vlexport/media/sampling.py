"""Choice of the frames of a video file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from vlexport.codec import check_fields
from vlexport.errors import InputError, LimitError
from vlexport.specs import check_frame_rate

# An hour at 240 frames a second has fewer; to choose so many takes 15 to 34 s, measured.
MOST_STEPS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Frames per second and most frames, in multiples of `multiple`; the defaults are of Qwen-VL.

    steady  what is shown at each step from the first frame on, however many; no count over the whole clip
    """

    frames_per_second: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2
    steady: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_frame_rate(self.frames_per_second)
        if not 1 <= self.multiple <= self.max_frames or not 1 <= self.min_frames <= self.max_frames:
            raise InputError(
                f"sampling: min frames {self.min_frames}, max frames {self.max_frames}, multiple "
                f"{self.multiple} given; 1 <= min <= max and 1 <= multiple <= max expected."
            )

    def count(self, total: int, rate: float) -> int:
        most = min(self.max_frames, total) // self.multiple * self.multiple
        if not most:
            return total
        count = min(max(total / rate * self.frames_per_second, self.min_frames), most)
        return max(math.floor(count / self.multiple), 1) * self.multiple


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Ascending times of frames in ticks of `tick` seconds, and the rate; `is_ordered`: without times."""

    ticks: Sequence[int]
    tick: Fraction
    declared_rate: Fraction | None
    is_ordered: bool = False

    @cached_property
    def is_constant(self) -> bool:
        """Return whether the declared rate puts every frame into its own slot, up to half an interval."""
        if not self.declared_rate:
            return False
        # whole numbers throughout: an interval is `long / short` ticks
        short, long = (self.declared_rate * self.tick).as_integer_ratio()
        first = self.ticks[0]
        return all(
            2 * abs((at - first) * short - number * long) < long for number, at in enumerate(self.ticks)
        )

    @property
    def seconds(self) -> Fraction:
        """Return the time from the first frame to the end of the last, which lasts as long as the average."""
        total, span = len(self.ticks), self.ticks[-1] - self.ticks[0]
        if self.declared_rate and (total == 1 or self.is_constant):
            return total / self.declared_rate
        return span * self.tick * Fraction(total, max(total - 1, 1))

    def second_of(self, index: int) -> float:
        """Return when a frame is shown: by its number at a constant rate, else by its own time."""
        if self.declared_rate and self.is_constant:
            return index / float(self.declared_rate)
        return float((self.ticks[index] - self.ticks[0]) * self.tick)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Frames to take, by their place in the timeline, the rate of what is taken, and when each is shown."""

    indices: tuple[int, ...]
    frames_per_second: float | None
    seconds: tuple[float, ...]


def choose(timeline: Timeline, sampling: Sampling) -> Choice:
    """Choose frames at even steps: of their number at a constant rate, else of time."""
    total, seconds = len(timeline.ticks), timeline.seconds
    if not seconds:
        return Choice(indices=(0,), frames_per_second=None, seconds=(0.0,))
    if sampling.steady:
        return _steady(timeline, sampling.frames_per_second)
    num = sampling.count(total, float(total / seconds))
    if timeline.is_constant:
        indices = tuple(number * total // num for number in range(num))
    else:
        length = seconds / timeline.tick
        indices = tuple(
            bisect_right(timeline.ticks, timeline.ticks[0] + number * length / num) - 1
            for number in range(num)
        )
    return Choice(
        indices=indices,
        frames_per_second=float(num / seconds),
        seconds=tuple(timeline.second_of(index) for index in indices),
    )


def _steady(timeline: Timeline, frames_per_second: float) -> Choice:
    """Choose what is shown at first + n / rate, up to the end of the last frame."""
    # A rate of 0.1 is a tenth, not the number of two's powers beside it.
    rate = Fraction(frames_per_second).limit_denominator(10**6) or Fraction(frames_per_second)
    ticks, total = timeline.ticks, len(timeline.ticks)
    indices = []
    if (num := math.ceil(timeline.seconds * rate)) > MOST_STEPS:
        raise LimitError(
            f"fps: {frames_per_second:g} given, {num} frames of this video; at most {MOST_STEPS} expected. "
            "Take fewer frames per second."
        )
    for number in range(num):
        at = number / rate
        if timeline.declared_rate and timeline.is_constant:
            indices.append(min(math.floor(at * timeline.declared_rate), total - 1))
        else:
            indices.append(bisect_right(ticks, ticks[0] + at / timeline.tick) - 1)
    return Choice(
        indices=tuple(indices),
        frames_per_second=frames_per_second,
        seconds=tuple(float(number / rate) for number in range(len(indices))),
    )
