"""Random calls of sliced images and videos, and how far two sets of tokens lie apart."""

from __future__ import annotations

import random

import torch
from vlexport.recipes.minicpmv import SliceRule

from vlexport.specs import MediaItem


def random_item(source: random.Random, rule: SliceRule, *, timed: bool, longest: int = 12) -> MediaItem:
    """Any sizes of slices; where times are allowed, any groups of them."""

    def size() -> tuple[int, int]:
        return source.randint(1, longest), source.randint(1, longest // 2)

    count = source.choice((1, 1, 2, 3, 5))
    sizes = [size()] * count if source.random() < 0.5 else [size() for _ in range(count)]
    groups: tuple[tuple[int, ...], ...] = ()
    if timed and source.random() < 0.7:
        groups = random_groups(source, count)
    rows = sum(rows * columns for rows, columns in sizes)
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    return MediaItem(
        kind="image",
        patches=torch.randn(rows, rule.row_width, generator=generator),
        grid=(count, *sizes[-1]),
        slices=tuple(sizes),
        frame_groups=groups,
    )


def random_groups(source: random.Random, count: int) -> tuple[tuple[int, ...], ...]:
    groups = []
    while count:
        taken = source.randint(1, min(3, count))
        groups.append(tuple(source.choice((-1, source.randint(0, 200))) for _ in range(taken)))
        count -= taken
    return tuple(groups)


def random_mix(source: random.Random, rule: SliceRule, *, timed: bool) -> list[MediaItem]:
    return [random_item(source, rule, timed=timed) for _ in range(source.randint(1, 4))]


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
