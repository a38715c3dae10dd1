"""Random prompts: positions equal a reference that walks them token by token, whole and in chunks."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from vlexport.integrations.vllm.expanded import expanded_video, image_channels
from vlexport.integrations.vllm.packed_embeds import PositionedRows
from vlexport.integrations.vllm.pruner import MultiModalPruner, PrefillRequest
from vlexport.positions.media import pruned_channels
from vlexport.positions.mrope import initial_positions, pruned_positions, recompute_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionOptions, PositionRule
from vlexport.positions.splice import Placeholder

TEXT, IMAGE, VIDEO, START, END = 100, 5, 6, 7, 8
MARKERS = FrameMarkers(vision_start=START, vision_end=END, video=VIDEO)


class Item:
    """A random image or video with its kept cells; no code shared with what is tested."""

    def __init__(self, rng, rate):
        self.kind = rng.choice(["image", "video"])
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

    def grid(self, merge):
        return (self.frames, self.rows * merge, self.columns * merge)


class Prompt:
    """Text and media in any order, adjacent media included; `tokens` holds None or (item, cell)."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.rng = rng
        self.rate = rng.choice([0.0, 0.25, 0.5, 0.75, 0.9, 0.99, rng.random() * 0.99])
        self.rule = PositionRule(
            kind="time_scaled",
            merge=rng.choice([1, 2, 3]),
            tokens_per_second=rng.choice([1, 2, 25]),
            options=PositionOptions(
                resume=rng.choice(["max_plus_one", "spatial"]),
                pruned_resume=rng.choice(["reference", "max"]),
                pruned_time=rng.choice(["integer", "float"]),
            ),
        )
        self.items = [Item(rng, self.rate) for _ in range(rng.randint(0, 6))]
        self.texts = [rng.randint(0, 8) for _ in self.items] + [rng.randint(0, 8)]
        if not self.items:
            self.texts = [rng.randint(1, 20)]

    def tokens(self, pruned):
        tokens = []
        for text, item in zip(self.texts, self.items, strict=False):
            tokens += [None] * text + [(item, cell) for cell in (item.kept if pruned else item.cells)]
        return tokens + [None] * self.texts[-1]

    def media(self, pruned):
        media, at = [], 0
        for text, item in zip(self.texts, self.items, strict=False):
            at += text
            length = len(item.kept if pruned else item.cells)
            media.append(
                PlacedMedia(
                    modality=item.kind,
                    offset=at,
                    length=length,
                    grid=item.grid(self.rule.merge),
                    seconds_per_grid=item.seconds if item.kind == "video" else None,
                )
            )
            at += length
        return media


def time_of(item, frame, rule, pruned):
    if item.kind == "image":
        return 0
    seconds = float(np.float32(item.seconds))
    if pruned and rule.options.pruned_time == "integer":
        return frame * rule.tokens_per_second * int(seconds)
    return int(frame * (seconds * rule.tokens_per_second))


def walk(prompt, pruned):
    """The plain rule, one token at a time."""
    options, columns = prompt.rule.options, []
    item_now: Item | None = None
    cursor, base, block = 0, 0, [(0, 0, 0)]

    def after(item):
        if pruned and options.pruned_resume == "reference":
            return base + item.columns
        if not pruned and options.resume == "spatial":
            return base + max(item.rows, item.columns)
        return base + 1 + max(max(place) for place in block)

    for token in prompt.tokens(pruned):
        item, cell_now = token or (None, 0)
        if item is not item_now:
            cursor = after(item_now) if item_now else cursor
            item_now, base, block = item, cursor, []
        if item is None:
            columns.append((cursor, cursor, cursor))
            cursor += 1
            continue
        frame, cell = divmod(cell_now, item.per_frame)
        row, column = divmod(cell, item.columns)
        block.append((time_of(item, frame, prompt.rule, pruned), row, column))
        columns.append((base + block[-1][0], base + row, base + column))
    return columns


def as_columns(positions):
    return [tuple(column) for column in positions.table_RN.T.tolist()]


def placeholders(media):
    return tuple(Placeholder(offset=item.offset, length=item.length) for item in media)


def prefill(request_media, blocks, table, options, borders):
    """Drive the pruner chunk by chunk; each chunk's own columns as they were right after it."""
    pruner = MultiModalPruner(hidden=2, options=options)
    seen = []
    for start, stop in pairwise(borders):
        request = PrefillRequest(
            placeholders=placeholders(request_media),
            positions_3N=table,
            num_computed=start,
            num_scheduled=stop - start,
        )
        entries = []
        for item, block in zip(request_media, blocks, strict=True):
            low, high = max(start - item.offset, 0), min(stop - item.offset, item.length)
            if low < high:
                part = block[:, low:high]
                entries.append(PositionedRows(embeds_KD=torch.zeros(high - low, 2), channels_CK=part))
        updated = pruner.recompute(entries, [request]).positions[0]
        if updated is not None:
            table = updated.table_RN
        seen.append(table[:, start:stop])
    return torch.cat(seen, dim=1), table


def chunk_borders(rng, length):
    if length <= 40 and rng.random() < 0.3:
        return list(range(length + 1))
    inner = rng.sample(range(1, length), min(rng.randint(0, 4), length - 1))
    return sorted({0, length, *inner})


def junk_after_first_item(table, media, rng):
    """Text before the first item is all that a stored table needs to hold."""
    table = table.clone()
    if media:
        table[:, media[0].offset :] = rng.randint(0, 1000)
    return table


@pytest.mark.parametrize("batch", range(8))
def test_positions_of_2000_random_prompts_equal_the_token_by_token_reference(batch):
    for seed in range(250 * batch, 250 * (batch + 1)):
        prompt = Prompt(seed)
        whole = initial_positions([TEXT] * len(prompt.tokens(False)), prompt.media(False), prompt.rule)
        expected = walk(prompt, pruned=False)
        assert as_columns(whole) == expected, seed
        top = max((max(column) for column in expected), default=-1)
        assert int(whole.delta) == (top + 1 - len(expected) if expected else 0), seed

        media, expected = prompt.media(True), walk(prompt, pruned=True)
        kept = [torch.tensor(item.kept) if item.kind == "video" else None for item in prompt.items]
        ours = pruned_positions(len(expected), media, kept, prompt.rule)
        assert as_columns(ours) == expected, seed
        blocks = [
            pruned_channels(place, prompt.rule, torch.tensor(item.kept))
            for place, item in zip(media, prompt.items, strict=True)
        ]
        offsets = [place.offset for place in media]
        again = recompute_positions(len(expected), offsets, blocks, prompt.rule.options)
        assert torch.equal(again.table_RN, ours.table_RN), seed
        assert torch.equal(again.delta, ours.delta), seed
        if not expected:
            continue

        stored = initial_positions([TEXT] * len(expected), media, prompt.rule, pruned=True).table_RN
        stored = junk_after_first_item(stored, media, prompt.rng)
        borders = chunk_borders(prompt.rng, len(expected))
        columns, final = prefill(media, blocks, stored, prompt.rule.options, borders)
        assert torch.equal(columns, ours.table_RN), (seed, borders)
        assert torch.equal(final, ours.table_RN), (seed, borders)


def test_rate_0_gives_the_positions_of_a_prompt_that_was_never_pruned():
    like_unpruned = PositionOptions(pruned_resume="max", pruned_time="float")
    checked = 0
    for seed in range(300):
        prompt = Prompt(seed)
        if prompt.rate > 0:
            continue
        rule = PositionRule(
            kind="time_scaled",
            merge=prompt.rule.merge,
            tokens_per_second=prompt.rule.tokens_per_second,
            options=like_unpruned,
        )
        tokens = len(prompt.tokens(False))
        unpruned = initial_positions([TEXT] * tokens, prompt.media(False), rule)
        kept = [torch.tensor(item.kept) for item in prompt.items]
        pruned = pruned_positions(tokens, prompt.media(True), kept, rule)
        assert torch.equal(pruned.table_RN, unpruned.table_RN), seed
        checked += 1
    assert checked > 30


def test_kept_tokens_keep_the_coordinates_of_their_cells():
    for seed in range(300):
        prompt = Prompt(seed)
        media = prompt.media(True)
        kept = [torch.tensor(item.kept) for item in prompt.items]
        ours = pruned_positions(len(prompt.tokens(True)), media, kept, prompt.rule).table_RN
        for place, item in zip(media, prompt.items, strict=True):
            full = pruned_channels(place, prompt.rule, torch.tensor(item.cells))[:3]
            columns = ours[:, place.offset : place.offset + place.length]
            # The first kept cell is the item's origin, so the difference is the item's start.
            assert torch.equal(columns - columns[0, 0], full[:, item.kept]), seed


class TimedPrompt:
    """Images and videos whose frames stand between written times; built un-pruned, then thinned."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.rng = rng
        self.unpruned_ids, self.unpruned, self.kept_columns, self.blocks, self.media = [], [], [], [], []
        self.unpruned_media = []
        for _ in range(rng.randint(0, 4)):
            self._text(rng.randint(0, 5))
            self._add(Item(rng, rng.choice([0.25, 0.5, 0.9])))
        self._text(rng.randint(1, 5))

    def _text(self, count):
        start = self._cursor()
        for step in range(count):
            self._token(TEXT, (start + step,) * 3)

    def _cursor(self):
        return 1 + max((max(column) for column in self.unpruned), default=-1)

    def _token(self, token, position, keep=True):
        self.unpruned_ids.append(token)
        self.unpruned.append(position)
        if keep:
            self.kept_columns.append(len(self.unpruned) - 1)

    def _frame(self, item, token, frame):
        base = self._cursor()
        for cell in range(item.per_frame):
            row, column = divmod(cell, item.columns)
            keep = frame * item.per_frame + cell in set(item.kept)
            self._token(token, (base, base + row, base + column), keep)

    def _add(self, item):
        if item.kind == "image":
            self._text(1)
        first, first_kept = len(self.unpruned), len(self.kept_columns)
        stamps = [[TEXT] * self.rng.randint(0, 4) for _ in range(item.frames)]
        for frame in range(item.frames):
            if item.kind == "image":
                self._frame(item, IMAGE, frame)
                continue
            self._text(len(stamps[frame]))
            self._token(START, (self._cursor(),) * 3)
            self._frame(item, VIDEO, frame)
            self._token(END, (self._cursor(),) * 3)
        size = {"modality": item.kind, "grid": item.grid(2)}
        self.unpruned_media.append(PlacedMedia(offset=first, length=len(self.unpruned) - first, **size))
        self.media.append(PlacedMedia(offset=first_kept, length=len(self.kept_columns) - first_kept, **size))
        if item.kind == "image":
            self.blocks.append(image_channels(item.grid(2), 2))
        else:
            self.videos = expanded_video(torch.tensor(item.kept), item.grid(2), stamps, RULE_WITH_TEXT)
            self.blocks.append(self.videos.channels_5L)


RULE_WITH_TEXT = PositionRule(kind="time_as_text", markers=MARKERS)


def test_prompts_that_write_time_as_text_equal_the_un_pruned_walk_minus_the_dropped_tokens():
    for seed in range(200):
        prompt = TimedPrompt(seed)
        whole = initial_positions(prompt.unpruned_ids, prompt.unpruned_media, RULE_WITH_TEXT)
        assert as_columns(whole) == prompt.unpruned, seed

        expected = [prompt.unpruned[column] for column in prompt.kept_columns]
        offsets = [place.offset for place in prompt.media]
        ours = recompute_positions(len(expected), offsets, prompt.blocks)
        assert as_columns(ours) == expected, seed

        stored = junk_after_first_item(torch.arange(len(expected)).expand(3, -1), prompt.media, prompt.rng)
        borders = chunk_borders(prompt.rng, len(expected))
        columns, final = prefill(prompt.media, prompt.blocks, stored, PositionOptions(), borders)
        assert torch.equal(columns, ours.table_RN), (seed, borders)
        assert torch.equal(final, ours.table_RN), (seed, borders)
