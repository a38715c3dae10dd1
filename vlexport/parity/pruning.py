"""L0 of pruning and splicing: counts, masks and rows, on vectors whose similarities are exact in every dtype.

T frames, N tokens per frame, D width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from vlexport.parity.tables import Finding
from vlexport.positions.splice import Placeholder, merge_visual, visual_slots
from vlexport.pruning.evs import prune, retained_count, retention_mask

# Two axes and the zero vector, so that many tokens are equal, opposite or new; lengths are powers of two.
NUM_DIRECTIONS, WIDTH = 3, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RATES = (0.1, 0.3, 0.5, 0.75, 0.9, 0.99)
# Cuts that fall among the tokens, not behind the first frame.
MASK_RATES = (0.05, 0.1, 0.3, 0.5, 0.7)
NUM_VIDEOS = 45


def check_pruning(rule: str | None, merge: int, seed: int) -> list[Finding]:
    """Counts, masks with many exact ties, surviving rows, and rows spliced into a prompt."""
    if rule != "evs":
        return []
    draw = random.Random(seed)
    counts = [(per, frames, rate) for per in (1, 4, 5, 10) for frames in (1, 2, 3, 7) for rate in RATES]
    miscounted = [each for each in counts if retained_count(*each) != _count(*each)]
    masks = [wrong for number in range(NUM_VIDEOS) if (wrong := _mask_fault(draw, merge, DTYPES[number % 3]))]
    spliced = [number for number in range(8) if not _splices(draw)]
    return [
        Finding(table="retained counts", wrong=len(miscounted), first=str(miscounted[:1])),
        Finding(table="retained tokens", wrong=len(masks), first=masks[0] if masks else ""),
        Finding(table="spliced rows", wrong=len(spliced), first=str(spliced[:1])),
    ]


def _count(per_frame: int, frames: int, rate: float) -> int:
    return max(per_frame, int(float(per_frame * frames) * (1.0 - rate)))


def _mask_fault(draw: random.Random, merge: int, dtype: torch.dtype) -> str:
    """What is wrong with one random video, or nothing."""
    frames, rows, columns = draw.randint(2, 5), draw.randint(1, 4), draw.randint(1, 4)
    per_frame, rate = rows * columns, draw.choice(MASK_RATES)
    tokens = [(draw.randrange(NUM_DIRECTIONS), draw.choice((1, -1))) for _ in range(frames * per_frame)]
    embeds = torch.zeros(frames * per_frame, WIDTH, dtype=dtype)
    for place, (direction, sign) in enumerate(tokens):
        if direction < NUM_DIRECTIONS - 1:
            embeds[place, direction] = sign * 2.0 ** draw.randint(-2, 2)
    grid = (frames, merge * rows, merge * columns)
    wanted = _kept(tokens, per_frame, _count(per_frame, frames, rate))
    mask = retention_mask(embeds, grid, merge, rate)
    pruned = prune(embeds, grid, merge, rate)
    if mask.nonzero().flatten().tolist() != wanted or pruned.kept.tolist() != wanted:
        return f"{frames} frames of {rows}x{columns} at rate {rate}: {pruned.kept.tolist()}, not {wanted}"
    return "" if torch.equal(pruned.embeds, embeds[torch.tensor(wanted)]) else "rows are not those kept"


def _kept(tokens: Sequence[tuple[int, int]], per_frame: int, count: int) -> list[int]:
    """The first frame whole, then the most changed; of equals the earliest."""
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


def _splices(draw: random.Random) -> bool:
    """Rows land in the embedding slots of their placeholders, in order, and nothing else changes."""
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
    text = torch.arange(total * 2.0).reshape(total, 2)
    visual = -1.0 - torch.arange(len(slots) * 2.0).reshape(len(slots), 2)
    merged: Tensor = merge_visual(text, visual, visual_slots(places, total))
    wanted = [text[at].tolist() for at in range(total)]
    for row, slot in enumerate(slots):
        wanted[slot] = visual[row].tolist()
    return bool(merged.tolist() == wanted)
