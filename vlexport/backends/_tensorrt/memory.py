"""Memory of a GPU that an engine will take, as the library says while it builds, without any GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")
# One for each profile, in their order.
ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of weights, and of what a context reserves for a profile; empty where nothing was said."""

    weights: int = 0
    contexts: tuple[int, ...] = ()


def heard(lines: Sequence[str], num_profiles: int) -> Memory:
    """What the log of one build says; other versions may say less, or in other words."""
    weights = [int(found[1]) for found in map(WEIGHTS.search, lines) if found]
    contexts = tuple(int(found[1]) for found in map(ACTIVATIONS.search, lines) if found)
    if len(weights) != 1 or len(contexts) != num_profiles:
        return Memory()
    return Memory(weights=weights[0], contexts=contexts)
