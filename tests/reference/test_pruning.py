"""Counts, masks and rows of pruning, and splicing: exact on still scenes, up to the cut on moving ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.pruning.masks import EVS_SNAP, retention_mask
from vlexport.positions.splice import Placeholder, merge_visual, visual_slots
from vlexport.pruning.evs import EVS, prune, retained_count
from vlexport.pruning.selectors import Selection

# Two axes and the zero vector, so that many tokens are equal, opposite or new; lengths are powers of two.
NUM_DIRECTIONS, WIDTH = 3, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RATES = (0.1, 0.3, 0.5, 0.75, 0.9, 0.99)
# Cuts that fall among the tokens, not behind the first frame.
MASK_RATES = (0.05, 0.1, 0.3, 0.5, 0.7)
NUM_VIDEOS = 15
# How near the cut one rounding of each step brings a token, in the dtypes and in steps of 2**-10.
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
NEAR_SNAPPED = 2.0**-9
MERGE = 2


def test_counts_of_kept_tokens() -> None:
    for rate, per_frame, frames in product(RATES, (1, 4, 5, 10), (1, 2, 3, 7)):
        assert retained_count(per_frame, frames, rate) == count(per_frame, frames, rate)


def count(per_frame: int, frames: int, rate: float) -> int:
    return max(per_frame, int(float(per_frame * frames) * (1.0 - rate)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_tokens_are_the_most_changed_and_of_equals_the_earliest(dtype: torch.dtype) -> None:
    draw = random.Random(str(dtype))
    for _ in range(NUM_VIDEOS):
        frames, rows, columns = draw.randint(2, 5), draw.randint(1, 4), draw.randint(1, 4)
        per_frame, rate = rows * columns, draw.choice(MASK_RATES)
        tokens = [(draw.randrange(NUM_DIRECTIONS), draw.choice((1, -1))) for _ in range(frames * per_frame)]
        embeds = torch.zeros(frames * per_frame, WIDTH, dtype=dtype)
        for place, (direction, sign) in enumerate(tokens):
            if direction < NUM_DIRECTIONS - 1:
                embeds[place, direction] = sign * 2.0 ** draw.randint(-2, 2)
        grid = (frames, MERGE * rows, MERGE * columns)
        wanted = most_changed(tokens, per_frame, count(per_frame, frames, rate))
        pruned = prune(embeds, grid, MERGE, rate)
        assert retention_mask(embeds, grid, MERGE, rate).nonzero().flatten().tolist() == wanted
        assert pruned.kept.tolist() == wanted
        assert torch.equal(pruned.embeds, embeds[torch.tensor(wanted)])


def most_changed(tokens: Sequence[tuple[int, int]], per_frame: int, count: int) -> list[int]:
    """Return the first frame whole, then the most changed; of equals the earliest."""
    change: list[float] = []
    for place, (direction, sign) in enumerate(tokens):
        before = tokens[place - per_frame] if place >= per_frame else None
        if before is None:
            change.append(255.0)
        elif direction != before[0] or direction == NUM_DIRECTIONS - 1:
            change.append(1.0)
        else:
            change.append(1.0 - sign * before[1])
    return sorted(sorted(range(len(tokens)), key=lambda place: (-change[place], place))[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_tokens_of_moving_scenes_are_those_of_float64_but_beside_the_cut(dtype: torch.dtype) -> None:
    source, draw = torch.Generator().manual_seed(0), random.Random(0)
    for frames in range(2, 65):
        rows, columns = draw.randint(1, 5), draw.randint(1, 5)
        per_frame, rate = rows * columns, draw.choice(RATES)
        steps = torch.randn(frames, per_frame, draw.choice((5, 16, 33)), generator=source)
        moves = torch.rand(frames, per_frame, 1, generator=source) < 0.6
        embeds = ((steps * moves * 0.5).cumsum(0) + steps[:1]).flatten(0, 1).to(dtype)
        unit = embeds.double() / embeds.double().norm(dim=-1, keepdim=True)
        change = [255.0] * per_frame + (1 - (unit[per_frame:] * unit[:-per_frame]).sum(-1)).tolist()
        size, grid = count(per_frame, frames, rate), (frames, MERGE * rows, MERGE * columns)
        order = sorted(range(len(change)), key=lambda place: -change[place])
        cuts: tuple[tuple[Selection, float], ...] = ((EVS, NEAR[dtype]), (EVS_SNAP, NEAR_SNAPPED))
        for selection, near in cuts:
            kept = prune(embeds, grid, MERGE, rate, selection).kept.tolist()
            assert len(kept) == size
            assert kept == sorted(set(kept))
            moved = {*order[:size]}.symmetric_difference(kept)
            cut = change[order[size - 1]]
            assert [place for place in moved if abs(change[place] - cut) >= near] == [], (frames, rate)


@pytest.mark.parametrize("seed", range(4))
def test_rows_land_in_the_slots_of_their_placeholders_and_nothing_else_changes(seed: int) -> None:
    draw = random.Random(seed)
    for dtype in (torch.float32, torch.bfloat16) * 10:
        places: list[Placeholder] = []
        column = 0
        for _ in range(draw.randint(1, 3)):
            column += draw.randint(0, 3)
            length = draw.randint(1, 6)
            mask = [True, *(draw.random() < 0.7 for _ in range(length - 1))]
            chosen = tuple(mask) if draw.random() < 0.5 else None
            places.append(Placeholder(offset=column, length=length, is_embed=chosen))
            column += length
        total = column + draw.randint(0, 3)
        slots = [
            place.offset + slot
            for place in places
            for slot in range(place.length)
            if place.is_embed is None or place.is_embed[slot]
        ]
        text = torch.arange(total * 2.0).reshape(total, 2).to(dtype)
        visual = (-1.0 - torch.arange(len(slots) * 2.0).reshape(len(slots), 2)).to(dtype)
        merged: Tensor = merge_visual(text, visual, visual_slots(places, total))
        before, wanted = text.tolist(), text.tolist()
        for row, slot in enumerate(slots):
            wanted[slot] = visual[row].tolist()
        assert (merged.tolist(), merged.dtype) == (wanted, dtype)
        assert text.tolist() == before, "the text stays as it was"
