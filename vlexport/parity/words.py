"""L0 of prompts: the text of an item has one slot for each of its embeddings, laid out as the image is cut.

Nothing here shares code with what it checks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from vlexport.language import PromptItem
from vlexport.parity.slice_calls import SlicedConfig, count_tokens
from vlexport.parity.subject import Subject
from vlexport.parity.tables import Finding
from vlexport.specs import MediaItem

CUTS = ((1, 2), (2, 1), (2, 3), (3, 2), (1, 5))


def check_words(subject: Subject, seed: int) -> list[Finding]:
    """Slots of images and videos; of cut images also how many stand in each line."""
    if subject.recipe.language is None:
        return []
    expand = subject.recipe.language.prompt.expand
    slots = subject.recipe.language.prompt.slots
    wrong: list[str] = []
    for number, (item, lines) in enumerate(_items(subject, seed)):
        text = expand(subject.config, PromptItem(item=item, number=number, num_rows=sum(lines)))
        given = [line.count(slots[item.kind]) for line in text.split("\n")]
        if given != lines:
            wrong.append(f"{item.kind} of {item.grid}: {given} slots a line, not {lines}")
    return [Finding(table="slots of prompts", wrong=len(wrong), first=wrong[0] if wrong else "")]


def _items(subject: Subject, seed: int) -> Iterator[tuple[MediaItem, list[int]]]:
    """Items, and the slots of each line of their text."""
    recipe, config, draw = subject.recipe, subject.config, random.Random(seed)
    nothing = torch.zeros(0, recipe.row_width(config))
    side = recipe.merge(config)
    kinds = {kind for mix in recipe.shape_sets(config).values() for kind, _ in mix}
    for kind in sorted(kinds):
        for frames in (1,) if kind == "image" else (1, 2, 5):
            rows, columns = draw.randint(1, 6), draw.randint(1, 6)
            grid = (frames, side * rows, side * columns)
            item = recipe.item(config, kind, grid, nothing)
            if isinstance(config, SlicedConfig):
                yield item, count_tokens([item], config.tower.queries)
            else:
                yield item, [frames * rows * columns]
    if not isinstance(config, SlicedConfig):
        return
    queries = config.tower.queries
    for down, across in CUTS:
        rows, columns = draw.randint(1, 6), draw.randint(1, 6)
        slices = ((draw.randint(1, 6), draw.randint(1, 6)), *((rows, columns),) * (down * across))
        grid = (1, down * rows, across * columns)
        item = MediaItem(kind="image", patches=nothing, grid=grid, slices=slices)
        yield item, [queries * (1 + across), *[queries * across] * (down - 1)]
