"""Pack items into calls of an engine, for engines that take any size and for captured ones.

A captured graph has one size. A *budget* is the number of output tokens that it is captured for; a batch of
items runs in the smallest budget that holds its tokens, and an item above the largest budget runs uncaptured.
Sizes count un-pruned tokens: pruning happens after the encoder.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from vlexport.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetPlan:
    """Budgets in ascending order, and the media items and video frames that one batch may hold."""

    budgets: tuple[int, ...]
    max_items: int
    max_frames: int

    def smallest_for(self, num_tokens: int) -> int | None:
        """Return the smallest budget that holds so many tokens, None if there is none."""
        place = bisect.bisect_left(self.budgets, num_tokens)
        return self.budgets[place] if place < len(self.budgets) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Items, by their place in the input, that run together; without a budget they run uncaptured."""

    items: tuple[int, ...]
    budget: int | None


def pack(tokens: Sequence[int], plan: BudgetPlan) -> tuple[Batch, ...]:
    """Fill batches smallest item first, closing one early where two small budgets beat one large."""
    if any(count < 1 for count in tokens):
        raise InputError(f"tokens per item {list(tokens)}: expected 1 or more for each.")
    batches: list[Batch] = []
    current: list[int] = []
    total = 0
    for item in sorted(range(len(tokens)), key=lambda index: tokens[index]):
        if current and (len(current) == plan.max_items or _better_apart(total, tokens[item], plan)):
            batches.append(Batch(items=tuple(current), budget=plan.smallest_for(total)))
            current, total = [], 0
        current.append(item)
        total += tokens[item]
    if current:
        batches.append(Batch(items=tuple(current), budget=plan.smallest_for(total)))
    return tuple(batches)


def _better_apart(total: int, added: int, plan: BudgetPlan) -> bool:
    """Return whether `added` tokens go to a batch of their own: they do not fit, or cost less there."""
    before, alone, joined = (plan.smallest_for(count) for count in (total, added, total + added))
    if before is None or alone is None or joined is None:
        return True
    return before + alone < joined and alone >= before
