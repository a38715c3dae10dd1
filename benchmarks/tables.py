"""Tables in Markdown, and the marked parts of pages that they are written into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from vlexport.errors import RequestError


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def replaced(text: str, begin: str, end: str, new: str) -> str:
    """Return the text with what stands between two marks replaced."""
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise RequestError(f"no place for the results; expected a line '{begin}' and a line '{end}'.")
    return f"{head}{begin}\n{new}\n{end}{tail}"


def write_between(page: Path, begin: str, end: str, new: str) -> None:
    """Replace what stands between two marks of a page."""
    page.write_text(replaced(page.read_text(encoding="utf-8"), begin, end, new), encoding="utf-8")
