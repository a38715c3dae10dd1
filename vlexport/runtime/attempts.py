"""Stages over many requests: what goes wrong with one of them becomes its value and goes no further."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from vlexport.bundle.os_errors import shortage
from vlexport.errors import InternalError, VlexportError

T = TypeVar("T")
U = TypeVar("U")


def attempt(stage: Callable[[T], U], given: T | VlexportError) -> U | VlexportError:
    """Return the stage's value, or the error that it or an earlier stage raised."""
    if isinstance(given, VlexportError):
        return given
    try:
        return stage(given)
    except Exception as error:  # noqa: BLE001  a request's outcome, whatever it is
        return outcome_of(error)


def each(stage: Callable[[T], U], given: Iterable[T | VlexportError]) -> list[U | VlexportError]:
    """`attempt` for every request, in order."""
    return [attempt(stage, one) for one in given]


def outcome_of(error: Exception) -> VlexportError:
    """Return an error of the tree as it is, any other as what it means, with itself as the cause."""
    if isinstance(error, VlexportError):
        return error
    found = shortage(error) or InternalError(
        f"unexpected {type(error).__name__}: {error!s:.500}. This is a bug of vlexport or of a library; the "
        "original error is its __cause__ (--debug shows it)."
    )
    found.__cause__ = error
    return found
