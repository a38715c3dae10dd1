"""Stages over many requests: what goes wrong with one of them becomes its value and goes no further."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from vlexport.errors import VlexportError

T = TypeVar("T")
U = TypeVar("U")


def attempt(stage: Callable[[T], U], given: T | VlexportError) -> U | VlexportError:
    """The stage's value, or the error that it or an earlier stage raised."""
    if isinstance(given, VlexportError):
        return given
    try:
        return stage(given)
    except VlexportError as error:
        return error


def each(stage: Callable[[T], U], given: Iterable[T | VlexportError]) -> list[U | VlexportError]:
    """`attempt` for every request, in order."""
    return [attempt(stage, one) for one in given]
