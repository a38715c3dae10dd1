"""Snapped scores against exact rational arithmetic: integers rounded once, nothing else."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from vlexport.pruning.evs import EvsSelector
from vlexport.pruning.selectors import best
from vlexport.pruning.snapped import _one_minus_cosine, _root, snapped_dissimilarity

# Steps in one, as docs and plans promise; not taken from what is judged.
STEPS = 1024


def half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


def even(value: Fraction) -> int:
    """Python rounds halves of fractions to even, as IEEE does."""
    return round(value)


def binade(value: Fraction) -> int:
    """The e with 2**(e - 1) <= value < 2**e."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    while Fraction(2) ** e <= value:
        e += 1
    while value < Fraction(2) ** (e - 1):
        e -= 1
    return e


def half_exponent(value: Fraction) -> int:
    """The k with 2**e <= 4**k < 2**(e + 2) for the binade e of a value."""
    return (binade(value) + 1) // 2


def whole(row: list[float]) -> list[int]:
    """Integers of a norm of at most 2**12, by two powers of two as the module's text defines them."""
    values = [Fraction(value) for value in row]
    largest = max(map(abs, values))
    if largest == 0:
        return [0] * len(row)
    width = Fraction(len(row)) - Fraction(1, 2)
    first = Fraction(2) ** (12 - half_exponent(width) - max(binade(largest), -80))
    rough = [even(value * first) for value in values]
    room = Fraction(1.0703125)
    bound = room * (sum(x * x for x in rough) + sum(map(abs, rough)) + Fraction(len(row), 4))
    scale = first * Fraction(2) ** (12 - half_exponent(bound))
    return [even(value * scale) for value in values]


def steps(one: list[float], other: list[float]) -> Fraction:
    """One minus the cosine of the integers, to the nearest of 1,024 steps, by integers alone."""
    a, b = whole(one), whole(other)
    dot, squares, others = (
        sum(x * y for x, y in zip(a, b, strict=True)),
        sum(x * x for x in a),
        sum(y * y for y in b),
    )
    if not squares or not others:
        return Fraction(1)
    return 1 - quotient(dot, squares, others)


def quotient(dot: int, square: int, other: int) -> Fraction:
    """Return the cosine as the nearest of 1,024 steps; norms are cut to multiples of 2**-5."""
    norms = math.isqrt(square * STEPS) * math.isqrt(other * STEPS)
    near = min(half_up(Fraction(abs(dot) * STEPS * STEPS, norms)), STEPS)
    return Fraction(near if dot >= 0 else -near, STEPS)


def rows(kind: str, width: int, count: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(width)
    plain = torch.randn(count, width, generator=source)
    if kind == "close":
        # Cosines near 1, 0 and -1, where a step is a small change of direction.
        base = plain[:1]
        return torch.cat(
            [base * sign + plain * 10.0**-power for sign in (1, -1) for power in range(count // 2)]
        )
    if kind == "small integers":
        return (plain * 2).round()
    if kind == "one large channel":
        return torch.where(torch.arange(width) == 0, 200.0, 1.0) * plain
    return plain * 2.0 ** torch.randint(-100, 100, (count, 1), generator=source)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 65])
def test_scores_are_those_of_exact_rationals(width: int) -> None:
    for kind in ("close", "small integers", "one large channel", "many magnitudes"):
        given = rows(kind, width, 24)
        wanted = [float(steps(now, before)) for before, now in pairwise(given.tolist())]
        for portable in (False, True):
            assert snapped_dissimilarity(given, 1, portable).tolist() == wanted, (kind, portable)


def test_candidates_beside_a_border_are_settled_by_integers() -> None:
    """All small pairs of integer vectors: quotients that lie on, just below and just above a half step."""
    pairs = [(x, y, u, v) for x in range(1, 14) for y in range(4) for u in (5, 12, 31) for v in range(-6, 7)]
    listed = [row for x, y, u, v in pairs for row in ([float(x), float(y)], [float(u), float(v)])]
    found = snapped_dissimilarity(torch.tensor(listed), 1, False).tolist()[::2]
    assert found == [float(steps(*listed[at : at + 2])) for at in range(0, len(listed), 2)]


def test_ties_at_the_cut_are_taken_from_the_lowest_index() -> None:
    scores = torch.tensor([3, 1, 2, 2, 3, 2, 1, 2, 0, 2, 3, 1, 2, 0, 2, 2, 3], dtype=torch.float32)
    ordered = sorted(range(len(scores)), key=lambda at: (-scores[at].item(), at))
    for count in range(1, len(scores) + 1):
        assert best(scores, count).tolist() == sorted(ordered[:count])


def test_a_score_that_is_none_counts_as_changed_and_the_first_frame_stays() -> None:
    embeds = torch.tensor(
        [[[1.0, 0.0], [0.0, 0.0]], [[math.nan, 1.0], [0.0, 0.0]], [[math.inf, 1.0], [1.0, 1.0]]]
    )
    for ties in ("exact", "snap"):
        scores = EvsSelector(ties=ties).scores(embeds, torch.tensor(0.5))
        assert scores.tolist() == [[255.0, 255.0], [1.0, 1.0], [1.0, 1.0]]


def test_quotients_a_hair_below_at_and_above_every_half_step_are_rounded_by_integers() -> None:
    """Float32 holds neither the product of unequal norms nor the quotient, so candidates are off.

    By floats alone 1,066 of these are one step too high, and 8 too low: those are below powers of two.
    """
    source = torch.Generator().manual_seed(0)
    squares = [2**24, 2**24 - 1, *torch.randint(2**22, 2**24, (400,), generator=source).tolist()]
    # Exact ties, for which the product of the norms is a multiple of 2**21.
    cases = [((2 * step + 1) * 2**13, 2**24, 2**24) for step in range(STEPS - 1)]
    for number, (square, before) in enumerate(pairwise(squares)):
        norms = math.isqrt(square * STEPS) * math.isqrt(before * STEPS)
        for step in range(STEPS) if number < 6 else (511, 1023):
            border = (2 * step + 1) * norms // (2 * STEPS * STEPS)
            cases += [(border, square, before), (border + 1, square, before)]
    found = _one_minus_cosine(*torch.tensor(cases).float().unbind(1)).tolist()
    assert found == [float(1 - quotient(*case)) for case in cases]


def test_roots_are_exact_where_float32_cannot_hold_their_squares() -> None:
    squares = [*range(1, 3000), *range(2**24 - 60000, 2**24 + 1)]
    found = _root(torch.tensor(squares, dtype=torch.float32))
    assert found.tolist() == [math.isqrt(1024 * square) for square in squares]
