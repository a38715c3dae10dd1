"""Requests over rates, lengths, orders and forms of media: counts by the formula, positions by a walk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from tests.reference.test_positions import Item, Prompt, as_columns
from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Generation, Request

RATES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.9, 0.99)
FRAMES = (1, 2, 3, 8, 64)
ORDERS = ((VIDEO,), (IMAGE, VIDEO), (VIDEO, IMAGE), (VIDEO, VIDEO))
FORMS = ("pixels", "embeddings")
ONE = Generation(max_new_tokens=1)


def answered(
    pipeline: Pipeline, order: tuple[str, ...], frames: int, rate: float | None, form: str
) -> Answer:
    """Answer one token to media in this order, each with a seed of its own."""
    images: list[Any] = [image(at, 56, 56) for at, kind in enumerate(order) if kind == IMAGE]
    videos: list[Any] = [video(at, frames, 56, 56) for at, kind in enumerate(order) if kind == VIDEO]
    if form == "embeddings":
        images, videos = ([pipeline.encode(each) for each in media] for media in (images, videos))
    words = prompt(*(f"part {at} {kind}" for at, kind in enumerate(order)), "what?")
    return pipeline.generate(
        Request(raw_prompt=words, images=images, videos=videos, prune=rate, generation=ONE)
    )


def walked(answer: Answer, pipeline: Pipeline, *, pruned: bool) -> list[tuple[int, int, int]]:
    """Return positions of the prompt by the plain rule, one token after the other."""
    assert pipeline.language is not None
    pads = {pipeline.language.tokenizer.id_of(f"<|{kind}_pad|>") for kind in ("image", "video")}
    found = Prompt.__new__(Prompt)
    found.rule, found.items, found.texts = pipeline._generator.embedder.rule, [], [0]  # type: ignore[union-attr]
    media, ids = list(answer.media), list(answer.prompt_token_ids)
    at = 0
    while at < len(ids):
        if ids[at] not in pads:
            found.texts[-1] += 1
            at += 1
            continue
        report = media.pop(0)
        item = Item.__new__(Item)
        item.kind, (item.frames, rows, columns) = report.kind, report.grid
        item.rows, item.columns = rows // found.rule.merge, columns // found.rule.merge
        item.per_frame, item.seconds = item.rows * item.columns, 1.0
        item.cells = list(range(item.frames * item.per_frame))
        item.kept = item.cells if report.mask is None else report.mask.nonzero().flatten().tolist()
        found.items.append(item)
        found.texts.append(0)
        at += len(item.kept)
    return found.walk(pruned=pruned)


@pytest.mark.slow
def test_counts_frames_and_positions_of_every_combination(
    fresh: Callable[..., Pipeline], record_property: Callable[[str, object], None]
) -> None:
    pipeline, count = fresh(), 0
    for order, frames, form in product(ORDERS, FRAMES, FORMS):
        whole = answered(pipeline, order, frames, None, form)
        for rate in RATES:
            where = (order, frames, form, rate)
            answer = answered(pipeline, order, frames, rate, form)
            for item in answer.media:
                steps, per_frame = item.grid[0], item.num_tokens // item.grid[0]
                if item.kind == "image" or rate == 0:
                    assert item.num_kept == item.num_tokens, where
                    continue
                assert item.num_kept == max(per_frame, int(float(steps * per_frame) * (1.0 - rate))), where
                assert item.mask is None or bool(item.mask[:per_frame].all()), where
            slots = len(answer.prompt_token_ids) - len(whole.prompt_token_ids)
            assert slots == sum(item.num_kept - item.num_tokens for item in answer.media), where
            assert as_columns(answer.positions) == walked(answer, pipeline, pruned=rate > 0), where
            if rate == 0:
                assert answer.token_ids == whole.token_ids, where
                assert torch.equal(answer.positions, whole.positions), where
            count += 1
    record_property("combinations of pruning", count)
