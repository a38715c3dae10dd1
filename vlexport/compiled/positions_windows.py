"""Which rows of which media item a prefill step needs. Host data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vlexport.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placeholder:
    """Columns of the prompt that one media item fills.

    is_embed  which of them take an embedding row; None means all of them.
    """

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise InputError(
                f"placeholder at {self.offset} of length {self.length}: expected an offset of 0 or more "
                f"and at least one token."
            )
        if self.is_embed is not None and len(self.is_embed) != self.length:
            raise InputError(
                f"placeholder at {self.offset} has length {self.length} and a mask of {len(self.is_embed)}; "
                f"expected one entry per token."
            )

    @property
    def end(self) -> int:
        """First column after the placeholder."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Embedding rows of the whole item."""
        return self.rows_between(0, self.length)[1]

    @property
    def has_gaps(self) -> bool:
        """Whether some of the columns take no embedding."""
        return self.num_embeds != self.length

    def rows_between(self, start: int, end: int) -> tuple[int, int]:
        """First and last-plus-one embedding row of the columns `start` to `end`, counted from the offset."""
        if self.is_embed is None:
            return start, end
        return sum(self.is_embed[:start]), sum(self.is_embed[:end])

    def column_ranges(self) -> list[tuple[int, int]]:
        """Runs of prompt columns that take embeddings, last column inclusive."""
        flags = self.is_embed or (True,) * self.length
        runs = []
        for taken, run in groupby(enumerate(flags, self.offset), key=lambda pair: pair[1]):
            columns = [column for column, _ in run]
            if taken:
                runs.append((columns[0], columns[-1]))
        return runs


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
    """First and last-plus-one item over the prompt columns `start` to `end`; items sorted and disjoint."""
    num_items = len(placeholders)
    low = next((i for i, each in enumerate(placeholders) if each.end > start), num_items)
    high = next((i for i, each in enumerate(placeholders) if each.offset >= end), num_items)
    return low, high


def windows_between(placeholders: Sequence[Placeholder], start: int, end: int) -> list[Window]:
    """The windows of a step over the prompt columns `start` to `end`; items without rows there have none."""
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
