"""Positions of random prompts whole, pruned and in chunks, against walks token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.positions.blocks import media_positions, recompute_positions
from vlexport.integrations.vllm.pruning import advance, place_rows, settled_positions, with_places
from vlexport.positions.expanded import expanded_video
from vlexport.positions.media import pruned_channels
from vlexport.positions.mrope import (
    frame_positions,
    initial_positions,
    pruned_positions,
)
from vlexport.positions.rules import (
    FrameMarkers,
    PlacedMedia,
    PositionOptions,
    PositionRule,
    decode_positions,
)

TEXT, IMAGE, VIDEO, START, END = 100, 5, 6, 7, 8
MARKERS = FrameMarkers(vision_start=START, vision_end=END, video=VIDEO)
TIME_AS_TEXT = PositionRule(kind="time_as_text", markers=MARKERS)
Triple = tuple[int, int, int]


class Item:
    """A random image or video with its kept cells; no code shared with what is tested."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.kind: Any = rng.choice(["image", "video"])
        self.frames = 1 if self.kind == "image" else rng.randint(1, 6)
        self.rows, self.columns = int(40 ** rng.random()), int(40 ** rng.random())
        self.seconds = rng.choice([0.5, 2 / 3, 1.0, 1.37, 2.0, 4.0])
        self.per_frame = self.rows * self.columns
        self.cells = list(range(self.frames * self.per_frame))
        self.kept = self.cells
        if rate > 0 and self.kind == "video":
            count = max(self.per_frame, int(len(self.cells) * (1 - rate)))
            rest = rng.sample(self.cells[self.per_frame :], count - self.per_frame)
            self.kept = self.cells[: self.per_frame] + sorted(rest)

    def placed(self, offset: int, length: int, merge: int) -> PlacedMedia:
        grid = (self.frames, self.rows * merge, self.columns * merge)
        seconds = self.seconds if self.kind == "video" else None
        return PlacedMedia(
            modality=self.kind, offset=offset, length=length, grid=grid, seconds_per_grid=seconds
        )

    def place(self, cell: int, rule: PositionRule, *, pruned: bool) -> Triple:
        """Return time, row and column of a cell, from the item's origin."""
        frame, rest = divmod(cell, self.per_frame)
        seconds = float(np.float32(self.seconds))
        if self.kind == "image":
            time = 0
        elif pruned and rule.options.pruned_time == "integer":
            # Whole paces are multiplied as integers, others in float32.
            time = int(np.float32(frame) * np.float32(rule.tokens_per_second * int(seconds)))
        else:
            time = int(frame * (seconds * rule.tokens_per_second))
        return (time, *divmod(rest, self.columns))


class Prompt:
    """Text and media in any order, adjacent media included; `tokens` holds None or (item, cell)."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        rate = rng.choice([0.0, 0.25, 0.5, 0.75, 0.9, 0.99, rng.random() * 0.99])
        self.rule = PositionRule(
            kind="time_scaled",
            merge=rng.choice([1, 2, 3]),
            tokens_per_second=rng.choice([1, 2, 25, 25 / 12]),
            options=PositionOptions(
                resume=rng.choice(["max_plus_one", "spatial"]),
                pruned_resume=rng.choice(["reference", "max"]),
                pruned_time=rng.choice(["integer", "float"]),
            ),
        )
        self.items = [Item(rng, rate) for _ in range(rng.randint(0, 6))]
        self.texts = [rng.randint(0, 8) for _ in self.items] + [rng.randint(0 if self.items else 1, 20)]

    def tokens(self, *, pruned: bool) -> list[tuple[Item | None, int]]:
        tokens: list[tuple[Item | None, int]] = []
        for text, item in zip(self.texts, self.items, strict=False):
            tokens += [(None, 0)] * text + [(item, cell) for cell in (item.kept if pruned else item.cells)]
        return tokens + [(None, 0)] * self.texts[-1]

    def media(self, *, pruned: bool) -> list[PlacedMedia]:
        media, at = [], 0
        for text, item in zip(self.texts, self.items, strict=False):
            length = len(item.kept if pruned else item.cells)
            media.append(item.placed(at + text, length, self.rule.merge))
            at += text + length
        return media

    def walk(self, *, pruned: bool) -> list[Triple]:
        """Apply the plain rule, one token at a time."""
        options, columns = self.rule.options, list[Triple]()
        item_now: Item | None = None
        cursor, base, block = 0, 0, [(0, 0, 0)]

        def after(item: Item) -> int:
            if pruned and options.pruned_resume == "reference":
                return base + item.columns
            if not pruned and options.resume == "spatial":
                return base + max(item.rows, item.columns)
            return base + 1 + max(max(place) for place in block)

        for item, cell in self.tokens(pruned=pruned):
            if item is not item_now:
                cursor = after(item_now) if item_now else cursor
                item_now, base, block = item, cursor, []
            if item is None:
                columns.append((cursor,) * 3)
                cursor += 1
                continue
            block.append(item.place(cell, self.rule, pruned=pruned))
            time, row, column = block[-1]
            columns.append((base + time, base + row, base + column))
        return columns

    def channels(self, item: Item) -> Tensor:
        """Return what a step gets of an item: places and width of its kept tokens."""
        cells = [(*item.place(cell, self.rule, pruned=True), item.columns) for cell in item.kept]
        return torch.tensor(cells).T


def as_columns(table_RN: Tensor) -> list[Triple]:
    return [(time, row, column) for time, row, column in table_RN.T.tolist()]


def assert_same_in_chunks(
    prompt: Prompt | TimedPrompt,
    ids: list[int],
    known: Sequence[tuple[PlacedMedia, Tensor, int]],
    wanted: list[Triple],
) -> None:
    """Assert that the plugin has the walk's columns after every chunk, also of one that is done again.

    `known` are media, their channels, and how far text goes on after them. In `ids` all slots of a video are
    in its first frame, as vLLM writes them before it is pruned.
    """
    rng, length = prompt.rng, len(wanted)
    items = [(item.offset, item.length, step) for item, _, step in known]
    table, shift = settled_positions(length, items)
    packed = []
    for item, block, _ in known:
        token = IMAGE if item.modality == "image" else VIDEO
        rows = torch.arange(item.length, dtype=torch.bfloat16)[:, None].repeat(1, 2)
        lead = ids[item.offset : item.end].index(token)
        packed.append((item, with_places(rows, block, token, lead)))
    borders = sorted({0, length, *rng.sample(range(1, length), min(rng.randint(0, 4), length - 1))})
    if length <= 40 and rng.random() < 0.3:
        borders = [*range(0, length, rng.randint(1, 4)), length]
    for start, stop in pairwise(borders):
        parts = []
        for item, rows in packed:
            low, high = max(start - item.offset, 0), min(stop - item.offset, item.length)
            parts += [rows[low:high]] if low < high else []
        for _ in range(rng.randint(1, 2)):
            clean, table, shift = place_rows(ids, parts, table, start)
            assert [each.shape[1] for each in clean] == [2] * len(parts)
            assert as_columns(table[:, :stop]) == wanted[:stop], (borders, stop)
    assert as_columns(table) == wanted, borders
    assert shift == 1 + max(map(max, wanted), default=-1) - length


@pytest.mark.seconds
@pytest.mark.parametrize("batch", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.thirty("prompts beside the walk of their positions", 400)
def test_positions_of_random_prompts_whole_pruned_and_in_chunks_are_those_of_the_walk(batch: int) -> None:
    for seed in range(400 * batch, 400 * (batch + 1)):
        prompt = Prompt(seed)
        expected = prompt.walk(pruned=False)
        whole = initial_positions([TEXT] * len(expected), prompt.media(pruned=False)[::-1], prompt.rule)
        assert as_columns(whole.table_RN) == expected, seed
        first = 1 + max((max(column) for column in expected), default=-1)
        assert int(whole.delta) == first - len(expected), seed
        assert decode_positions(whole.delta, len(expected), 2).tolist() == [[first, first + 1]] * 3, seed

        media, expected = prompt.media(pruned=True), prompt.walk(pruned=True)
        kept = [torch.tensor(item.kept) if item.kind == "video" else None for item in prompt.items]
        ours = pruned_positions(len(expected), media, kept, prompt.rule)
        assert as_columns(ours.table_RN) == expected, seed
        assert int(ours.delta) == 1 + max((max(column) for column in expected), default=-1) - len(expected), (
            seed
        )
        blocks = [prompt.channels(item) for item in prompt.items]
        for place, item, block in zip(media, prompt.items, blocks, strict=True):
            assert torch.equal(pruned_channels(place, prompt.rule, torch.tensor(item.kept)), block), seed
        offsets = [place.offset for place in media]
        again = recompute_positions(len(expected), offsets, blocks, prompt.rule.options)
        assert torch.equal(again.table_RN, ours.table_RN), seed
        assert torch.equal(again.delta, ours.delta), seed

        ids = [
            TEXT if item is None else IMAGE if item.kind == "image" else VIDEO
            for item, _ in prompt.tokens(pruned=True)
        ]
        steps = [int(block[3, 0]) for block in blocks]
        if prompt.rule.options.pruned_resume == "max":
            steps = [1 + int(block[:3].max()) for block in blocks]
        else:
            assert steps == [advance(place, ids, prompt.rule) for place in media]
        assert_same_in_chunks(prompt, ids, list(zip(media, blocks, steps, strict=True)), expected)


class TimedPrompt:
    """Images and videos whose frames stand between written times; built un-pruned, then thinned."""

    rule = TIME_AS_TEXT

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.ids, self.columns, self.kept = list[int](), list[Triple](), list[int]()
        self.whole, self.pruned, self.blocks = list[PlacedMedia](), list[PlacedMedia](), list[Tensor]()
        self.cells = list[list[int] | None]()
        for _ in range(rng.randint(0, 4)):
            self._text(rng.randint(0, 5))
            self._add(Item(rng, rng.choice([0.25, 0.5, 0.9])))
        self._text(rng.randint(1, 5))

    def _cursor(self) -> int:
        return 1 + max((max(column) for column in self.columns), default=-1)

    def _token(self, token: int, position: Triple, *, keep: bool = True) -> None:
        self.ids.append(token)
        self.columns.append(position)
        if keep:
            self.kept.append(len(self.columns) - 1)

    def _text(self, count: int, token: int = TEXT) -> None:
        for _ in range(count):
            self._token(token, (self._cursor(),) * 3)

    def _frame(self, item: Item, token: int, frame: int) -> None:
        base = self._cursor()
        for cell in range(item.per_frame):
            row, column = divmod(cell, item.columns)
            keep = frame * item.per_frame + cell in set(item.kept)
            self._token(token, (base, base + row, base + column), keep=keep)

    def _add(self, item: Item) -> None:
        stamps = [[TEXT] * self.rng.randint(0, 4) for _ in range(item.frames)]
        first, first_kept = len(self.columns), len(self.kept)
        if item.kind == "image":
            self._frame(item, IMAGE, 0)
        else:
            for frame, stamp in enumerate(stamps):
                self._text(len(stamp))
                self._text(1, START)
                self._frame(item, VIDEO, frame)
                self._text(1, END)
        self.whole.append(item.placed(first, len(self.columns) - first, 2))
        self.pruned.append(item.placed(first_kept, len(self.kept) - first_kept, 2))
        grid = self.whole[-1].grid
        self.cells.append(item.kept if item.kind == "video" else None)
        if item.kind == "image":
            channels_4L = media_positions(grid, 2, 1, 1).T
            self.blocks.append(torch.cat([channels_4L, torch.zeros_like(channels_4L[:1])]))
        else:
            video = expanded_video(torch.tensor(item.kept), grid, stamps, TIME_AS_TEXT)
            self.blocks.append(video.channels_5L)


@pytest.mark.seconds
def test_prompts_that_write_time_as_text_are_the_un_pruned_walk_minus_the_dropped_tokens() -> None:
    for seed in range(200):
        prompt = TimedPrompt(seed)
        whole = initial_positions(prompt.ids, prompt.whole, TIME_AS_TEXT)
        assert as_columns(whole.table_RN) == prompt.columns, seed
        expected = [prompt.columns[column] for column in prompt.kept]
        offsets = [place.offset for place in prompt.pruned]
        ours = recompute_positions(len(expected), offsets, prompt.blocks)
        assert as_columns(ours.table_RN) == expected, seed
        thinned = [prompt.ids[column] for column in prompt.kept]
        known = [torch.tensor(kept) if kept is not None else None for kept in prompt.cells]
        found = frame_positions(thinned, prompt.pruned, known, TIME_AS_TEXT)
        assert as_columns(found.table_RN) == expected, seed
        assert int(found.delta) == 1 + max(map(max, expected)) - len(expected)
        lumped = list(thinned)
        for place in prompt.pruned:
            if place.modality == "video":
                inside = thinned[place.offset : place.end]
                at, count = inside.index(START) + 1, inside.count(VIDEO)
                text = [token for token in inside if token != VIDEO]
                lumped[place.offset : place.end] = [*text[:at], *[VIDEO] * count, *text[at:]]
        steps = [advance(place, lumped, TIME_AS_TEXT) for place in prompt.pruned]
        known_rows = list(zip(prompt.pruned, prompt.blocks, steps, strict=True))
        assert_same_in_chunks(prompt, lumped, known_rows, expected)
