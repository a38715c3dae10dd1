"""L0 of prompts: the text of an item is the one that the published processors write, slot by slot.

Nothing here shares code with what it checks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping

import torch

from vlexport.checkpoint import Checkpoint
from vlexport.language import PromptItem
from vlexport.parity.slice_calls import count_tokens
from vlexport.parity.slice_sizes import config_facts
from vlexport.parity.subject import Subject
from vlexport.parity.tables import Finding
from vlexport.specs import MediaItem
from vlexport.vision.slice_facts import facts_of

CUTS = ((1, 2), (2, 1), (2, 3), (3, 2), (1, 5))
Texts = Iterator[tuple[MediaItem, int, str]]


def check_words(subject: Subject, seed: int) -> list[Finding]:
    """Compare the texts of images and videos, whole and cut, first and later ones of a prompt."""
    if subject.recipe.language is None:
        return []
    expand = subject.recipe.language.prompt.expand
    made = _sliced(subject, seed) if subject.packing.queried else _merged(subject, seed)
    wrong: list[str] = []
    for number, (item, rows, wanted) in enumerate(made):
        text = expand(subject.config, PromptItem(item=item, number=number, num_rows=rows))
        right = wanted.replace("NUMBER", str(number))
        if text != right:
            wrong.append(f"{item.kind} of {item.grid}: {_parting(text, right)}")
    return [Finding(table="words of prompts", wrong=len(wrong), first=wrong[0] if wrong else "")]


def _parting(given: str, wanted: str) -> str:
    """Say where two texts part."""
    at = next((at for at, pair in enumerate(zip(given, wanted, strict=False)) if pair[0] != pair[1]), -1)
    at = at if at >= 0 else min(len(given), len(wanted))
    return f"{given[at : at + 30]!r} at character {at}, not {wanted[at : at + 30]!r}"


def _merged(subject: Subject, seed: int) -> Texts:
    """Yield items of one token per square of patches: the slot that config.json names, once for each."""
    recipe, config, draw = subject.recipe, subject.config, random.Random(seed)
    nothing, side = torch.zeros(0, recipe.row_width(config)), recipe.merge(config)
    for kind in sorted({kind for mix in recipe.shape_sets(config).values() for kind, _ in mix}):
        slot = slot_token(subject.checkpoint, kind)
        for frames in (1,) if kind == "image" else (1, 2, 5):
            rows, columns = draw.randint(1, 6), draw.randint(1, 6)
            item = recipe.item(config, kind, (frames, side * rows, side * columns), nothing)
            yield item, frames * rows * columns, slot * (frames * rows * columns)


def slot_token(checkpoint: Checkpoint, kind: str) -> str:
    """Return the token whose id config.json gives this kind; the published one without a tokenizer."""
    path = checkpoint.path / "tokenizer.json"
    added = json.loads(path.read_text(encoding="utf-8"))["added_tokens"] if path.exists() else []
    named: Mapping[object, str] = {each["id"]: each["content"] for each in added}
    return named.get(checkpoint.config.get(f"{kind}_token_id"), f"<|{kind}_pad|>")


def _sliced(subject: Subject, seed: int) -> Texts:
    """Yield images as they are and cut, and videos where the release takes them."""
    recipe, config, draw = subject.recipe, subject.config, random.Random(seed)
    facts, nothing = facts_of(subject.checkpoint), torch.zeros(0, recipe.row_width(config))
    numbered = config_facts(subject.checkpoint)["numbered"]
    run, queries = "<unk>" * facts.queries, facts.queries
    whole = ("<image_id>NUMBER</image_id>" if numbered else "") + f"<image>{run}</image>"
    for _ in range(2):
        grid = (1, draw.randint(1, 6), draw.randint(1, 6))
        yield recipe.item(config, "image", grid, nothing), queries, whole
    for frames in (1, 2, 5) if facts.release.videos else ():
        grid = (frames, draw.randint(1, 6), draw.randint(1, 6))
        item = recipe.item(config, "video", grid, nothing)
        (rows,) = count_tokens([item], queries)
        yield item, rows, f"<image>{run}</image>" * (rows // queries)
    cell = f"<slice>{run}</slice>" if facts.release.slice_words else f"<image>{run}</image>"
    for down, across in CUTS:
        rows, columns = draw.randint(1, 6), draw.randint(1, 6)
        slices = ((draw.randint(1, 6), draw.randint(1, 6)), *((rows, columns),) * (down * across))
        item = MediaItem(
            kind="image", patches=nothing, grid=(1, down * rows, across * columns), slices=slices
        )
        cells = "\n".join([cell * across] * down)
        cells = cells if facts.release.slice_words else f"<slice>{cells}</slice>"
        yield item, queries * (1 + down * across), whole + cells
