"""How many floating point operations a call needs, two per multiply-add, counted and not estimated.

Zeros that fill up the inner width of a tower count too: a thousandth at the released 3,420.

R runs, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vlexport.checkpoint import Checkpoint
from vlexport.errors import RequestError
from vlexport.recipe import Recipe
from vlexport.specs import MediaItem


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Operations per token outside attention, and per score entry and head of each kind of block."""

    per_token: float
    per_score: Mapping[str, float]

    def of(self, recipe: Recipe[Any], config: Any, items: Sequence[MediaItem]) -> float:
        """Of a call, without any padding."""
        tokens = sum(recipe.num_tokens(config, item) for item in items)
        needed = {kind: least for kind, (_, least) in recipe.attention_work(config, items, "runs").items()}
        return self.per_token * tokens + sum(
            self.per_score.get(kind, 0.0) * count for kind, count in needed.items()
        )


def count_work(recipe: Recipe[Any], checkpoint: Checkpoint, items: Sequence[MediaItem]) -> Work:
    """Count one small call; `items` must give every kind of block another number of scores."""
    config = recipe.read_config(checkpoint)
    inputs = recipe.prepare(config, items, "runs")
    known = {count: kind for kind, (count, _) in recipe.attention_work(config, items, "runs").items()}
    found = dict.fromkeys(known.values(), 0.0)

    def attention(q_NHD: Tensor, k: Tensor, v: Tensor, runs_R2: Tensor, scale: float, **_: object) -> int:  # noqa: ARG001
        scores = int((runs_R2[:, 0].long() * runs_R2[:, 1].long() ** 2).sum())
        if scores not in known:
            raise RequestError(f"recipe '{recipe.name}': {scores} scores are of no kind of block: {known}.")
        operations = 4 * q_NHD.shape[1] * q_NHD.shape[2]
        found[known[scores]] += operations
        return 0

    setattr(attention, "_get_raw", True)  # noqa: B010  the counter then hands over tensors, not shapes
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.vlexport.segment_attention: attention})
    with torch.inference_mode(), counter:
        recipe.tower(checkpoint, "float32", "runs")(inputs)
    tokens = sum(recipe.num_tokens(config, item) for item in items)
    return Work(per_token=counter.get_total_flops() / tokens, per_score=found)
