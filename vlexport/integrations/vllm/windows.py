"""Rows of media items that a prefill step needs. Host data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlexport.positions.splice import Placeholder


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The part of an item inside a step: columns counted from its offset, and their embedding rows."""

    placeholder: Placeholder
    start: int
    end: int
    first_row: int
    end_row: int

    @property
    def num_rows(self) -> int:
        """Embedding rows in the window."""
        return self.end_row - self.first_row


def items_in_window(placeholders: Sequence[Placeholder], start: int, end: int) -> tuple[int, int]:
    """Return first and last-plus-one item over the prompt columns `start` to `end`."""
    num_items = len(placeholders)
    low = next((i for i, each in enumerate(placeholders) if each.offset + each.length > start), num_items)
    high = next((i for i, each in enumerate(placeholders) if each.offset >= end), num_items)
    return low, high


def windows_between(placeholders: Sequence[Placeholder], start: int, end: int) -> list[Window]:
    """Return windows over the prompt columns `start` to `end`; items without rows there have none."""
    low, high = items_in_window(placeholders, start, end)
    windows = []
    for placeholder in placeholders[low:high]:
        first = max(start - placeholder.offset, 0)
        stop = min(end - placeholder.offset, placeholder.length)
        first_row, end_row = placeholder.rows_between(first, stop)
        if end_row > first_row:
            windows.append(
                Window(placeholder=placeholder, start=first, end=stop, first_row=first_row, end_row=end_row)
            )
    return windows
