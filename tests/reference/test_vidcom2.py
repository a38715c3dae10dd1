"""VidCom2 written a second time: rationals where its rule is rational, else decimals of 50 digits."""

from decimal import Context, Decimal, localcontext
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from tests.pruning.masks import retention_mask
from vlexport.pruning.selectors import eager
from vlexport.pruning.vidcom2 import VidCom2Selector

# Values nearer than this may change places in float32, whose sums here are wrong by 1e-6 at most.
NEAR = Decimal("1e-5")
WIDTHS = [Decimal(width) for width in ("0.125", "0.25", "0.5", "1", "2")]
Row = list[Decimal]


def mean(values: list[Decimal]) -> Decimal:
    return sum(values, Decimal()) / len(values)


def apart(values: list[Decimal]) -> bool:
    return all(after - before > NEAR for before, after in pairwise(sorted(values)))


def steady(frames: list[list[list[int]]]) -> list[int]:
    """Return the channels of lower variance over the video; no two of the channels vary equally."""
    rows = [row for frame in frames for row in frame]
    variances = []
    for channel in zip(*rows, strict=True):
        centre = Fraction(sum(channel), len(channel))
        variances.append(sum((value - centre) ** 2 for value in channel) / len(channel))
    assert len(set(variances)) == len(variances)
    return sorted(range(len(variances)), key=lambda at: variances[at])[: max(1, len(variances) // 2)]


def unit(row: list[int], channels: list[int]) -> Row:
    norm = Decimal(sum(row[at] ** 2 for at in channels)).sqrt()
    return [Decimal(row[at]) / norm for at in channels]


def near(row: Row, centre: Row) -> Decimal:
    squared = sum(((x - c) ** 2 for x, c in zip(row, centre, strict=True)), Decimal())
    return sum(((-squared / (2 * width)).exp() for width in WIDTHS), Decimal())


def centre(rows: list[Row]) -> Row:
    return [mean(list(column)) for column in zip(*rows, strict=True)]


def kept(frames: list[list[list[int]]], rate: Fraction) -> set[tuple[int, int]] | None:
    """Return frames and places of the tokens kept; nothing where float32 cannot distinguish two of them."""
    channels = steady(frames)
    units = [[unit(row, channels) for row in frame] for frame in frames]
    video = centre([row for frame in units for row in frame])
    to_video = [[near(row, video) for row in frame] for frame in units]
    similar = [
        [known + near(row, centre(frame)) for known, row in zip(line, frame, strict=True)]
        for line, frame in zip(to_video, units, strict=True)
    ]
    scores = [-mean(line) for line in to_video]
    weights = [((score - max(scores)) * 100).exp() for score in scores]
    shares = [weight / sum(weights) for weight in weights]
    left, per_frame = 1 - rate, len(frames[0])
    scaled = [
        min(Decimal(1), Decimal(float(left)) * (1 + share - mean(shares))) * per_frame for share in shares
    ]
    halves = [abs(value - int(value) - Decimal("0.5")) for value in scaled]
    if not apart([value for line in similar for value in line]) or min(halves) < Decimal("1e-3"):
        return None
    budgets = [min(max(round(value), 1), per_frame) for value in scaled]
    inside = {
        (t, similar[t].index(value))
        for t, budget in enumerate(budgets)
        for value in sorted(similar[t])[:budget]
    }
    places = [(t, at) for t in range(len(frames)) for at in range(per_frame)]
    every = sorted(places, key=lambda place: similar[place[0]][place[1]])
    # Those within budgets, least similar first, then the others, as many as the video keeps.
    ranked = [place for place in every if place in inside] + [place for place in every if place not in inside]
    return set(ranked[: max(len(frames), int(len(frames) * per_frame * left))])


@pytest.mark.parametrize("rate", [Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(7, 8)])
def test_masks_are_those_of_the_rule_in_decimals(rate: Fraction) -> None:
    judged, budgets = 0, set()
    for seed in range(12):
        values = torch.randint(-9, 10, (3, 8, 7), generator=torch.Generator().manual_seed(seed))
        with localcontext(Context(prec=50)):
            wanted = kept(values.tolist(), rate)
        if wanted is None:
            continue
        judged += 1
        mask = retention_mask(
            values.flatten(0, 1).float(), (3, 4, 8), 2, float(rate), eager(VidCom2Selector())
        )
        budgets.add(tuple(mask.view(3, 8).sum(1).tolist()))
        assert {(at // 8, at % 8) for at in mask.nonzero().flatten().tolist()} == wanted, seed
    assert judged >= 5
    assert len(budgets) > 1
