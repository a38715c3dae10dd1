"""Calls that take turns: each once a round, in random order and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from vlexport.evaluate.bench import order_of

T = TypeVar("T")


def in_turn(calls: Mapping[str, Callable[[], T]], rounds: int, seed: int = 0) -> dict[str, list[T]]:
    """Return what each call gives in each round; a first round that warms up is left out."""
    answers: dict[str, list[T]] = {name: [] for name in calls}
    for index in range(-1, rounds):
        for name in order_of(list(calls), index, seed):
            answers[name].append(calls[name]())
    return {name: rest for name, (_, *rest) in answers.items()}


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
