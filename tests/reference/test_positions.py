"""Positions of prompts whole, pruned and in chunks, against a walk token by token.   N prompt columns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from vlexport.integrations.vllm.packed_embeds import PositionedRows
from vlexport.integrations.vllm.pruner import MultiModalPruner, PrefillRequest
from vlexport.positions.mrope import initial_positions, pruned_positions
from vlexport.positions.rules import (
    Modality,
    PlacedMedia,
    PositionRule,
    decode_positions,
)
from vlexport.positions.splice import Placeholder

Triple = tuple[int, int, int]
NUM_PROMPTS = 24
SECONDS = (0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A media item in a prompt: merged sides, and the tokens that pruning left."""

    kind: Modality
    offset: int
    frames: int
    rows: int
    columns: int
    seconds: float
    kept: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.frames * self.rows * self.columns

    def cell(self, token: int) -> Triple:
        frame, rest = divmod(token, self.rows * self.columns)
        return (frame, *divmod(rest, self.columns))

    def placed(self, merge: int, length: int) -> PlacedMedia:
        return PlacedMedia(
            modality=self.kind,
            offset=self.offset,
            length=length,
            grid=(self.frames, merge * self.rows, merge * self.columns),
            seconds_per_grid=self.seconds if self.kind == "video" else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Items at their offsets, and the number of columns."""

    items: tuple[Item, ...]
    num_columns: int

    def __str__(self) -> str:
        grids = [
            f"{each.kind} {each.frames}x{each.rows}x{each.columns} at {each.offset}" for each in self.items
        ]
        return f"{self.num_columns} columns with {', '.join(grids)}"

    def walk(self, rate: float, *, pruned: bool) -> tuple[list[list[int]], int]:
        """Return three positions of every column, and the shift of what is decoded after them."""
        columns: list[Triple] = []
        current = 0
        for item in self.items:
            while len(columns) < item.offset:
                columns.append((current,) * 3)
                current += 1
            seconds = int(item.seconds) if pruned else item.seconds
            factor = rate * seconds if item.kind == "video" else 1.0
            cells = [item.cell(token) for token in (item.kept if pruned else range(item.num_tokens))]
            block = [(int(frame * factor), row, column) for frame, row, column in cells]
            columns += [(current + t, current + row, current + column) for t, row, column in block]
            current += item.columns if pruned else 1 + max(max(place) for place in block)
        while len(columns) < self.num_columns:
            columns.append((current,) * 3)
            current += 1
        delta = max(max(column) for column in columns) + 1 - self.num_columns
        return [list(axis) for axis in zip(*columns, strict=True)], delta


@pytest.fixture
def rule() -> PositionRule:
    return PositionRule(kind="time_scaled", merge=2, tokens_per_second=2.0)


def prompts(seed: int, *, pruned: bool) -> Iterator[tuple[random.Random, Prompt]]:
    draw = random.Random(seed)
    for _ in range(NUM_PROMPTS):
        yield draw, random_prompt(draw, pruned=pruned)


def test_positions_of_whole_prompts_are_those_of_the_walk(rule) -> None:
    for _, prompt in prompts(0, pruned=False):
        media = [item.placed(rule.merge, item.num_tokens) for item in prompt.items]
        wanted = prompt.walk(rule.tokens_per_second, pruned=False)
        given = initial_positions([0] * prompt.num_columns, media[::-1], rule)
        assert (given.table_RN.tolist(), int(given.delta)) == wanted, prompt
        first = prompt.num_columns + wanted[1]
        assert decode_positions(given.delta, prompt.num_columns, 2).tolist() == [[first, first + 1]] * 3


def test_positions_of_pruned_prompts_are_those_of_the_walk(rule) -> None:
    for _, prompt in prompts(1, pruned=True):
        media = [item.placed(rule.merge, len(item.kept)) for item in prompt.items]
        kept = [torch.tensor(item.kept) for item in prompt.items]
        given = pruned_positions(prompt.num_columns, media, kept, rule)
        wanted = prompt.walk(rule.tokens_per_second, pruned=True)
        assert (given.table_RN.tolist(), int(given.delta)) == wanted, prompt


def test_after_every_chunk_the_columns_so_far_are_those_of_the_walk(rule) -> None:
    for draw, prompt in prompts(2, pruned=True):
        count = prompt.num_columns
        borders = sorted({0, count, *(draw.randint(0, count) for _ in range(3))})
        table, delta = prompt.walk(rule.tokens_per_second, pruned=True)
        media = [item.placed(rule.merge, len(item.kept)) for item in prompt.items]
        known = initial_positions([0] * count, media, rule, pruned=True)
        places = tuple(Placeholder(offset=item.offset, length=len(item.kept)) for item in prompt.items)
        pruner = MultiModalPruner(hidden=1, options=rule.options)
        for start, stop in pairwise(borders):
            request = PrefillRequest(
                placeholders=places,
                positions_3N=known.table_RN,
                num_computed=start,
                num_scheduled=stop - start,
            )
            rows = [rows_of(item, rule, start, stop) for item in prompt.items]
            step = pruner.recompute([each for each in rows if each is not None], [request])
            known = step.positions[0] or known
            assert known.table_RN[:, :stop].tolist() == [axis[:stop] for axis in table], (prompt, stop)
        assert (known.table_RN.tolist(), int(known.delta)) == (table, delta), prompt


def random_prompt(draw: random.Random, *, pruned: bool) -> Prompt:
    items: list[Item] = []
    column = 0
    for _ in range(draw.randint(1, 3)):
        column += draw.choice((0, 1, 2, 5))
        kind: Modality = draw.choice(("image", "video"))
        frames = 1 if kind == "image" else draw.randint(1, 4)
        rows, columns = draw.randint(1, 5), draw.randint(1, 5)
        count = frames * rows * columns
        kept = draw.randint(rows * columns, count)
        chosen = sorted(
            [*range(rows * columns), *draw.sample(range(rows * columns, count), kept - rows * columns)]
        )
        items.append(
            Item(
                kind=kind,
                offset=column,
                frames=frames,
                rows=rows,
                columns=columns,
                seconds=draw.choice(SECONDS),
                kept=tuple(chosen),
            )
        )
        column += len(chosen) if pruned else count
    return Prompt(items=tuple(items), num_columns=column + draw.randint(0, 4))


def rows_of(item: Item, rule: PositionRule, start: int, stop: int) -> PositionedRows | None:
    """Return what a step gets of an item: the channels of its tokens in these columns."""
    first, last = max(start - item.offset, 0), min(stop - item.offset, len(item.kept))
    if last <= first:
        return None
    factor = rule.tokens_per_second * int(item.seconds) if item.kind == "video" else 1.0
    cells = [item.cell(token) for token in item.kept[first:last]]
    channels = [[int(frame * factor), row, column, item.columns] for frame, row, column in cells]
    return PositionedRows(
        embeds_KD=torch.zeros(last - first, 1), channels_CK=torch.tensor(channels).reshape(-1, 4).T
    )
