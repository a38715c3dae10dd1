"""Tables in Markdown, and the marked parts of pages that they are written into.

`python -m benchmarks.tables README.md` rewrites the support table, from what recipes and backends declare.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path

from vlexport.errors import RequestError
from vlexport.recipe import list_recipes
from vlexport.system import write_synced


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def marks(what: str, writer: str) -> tuple[str, str]:
    """Return the lines of a page that a part stands between; the first says which command writes it."""
    return f"<!-- {what}, written by `{writer}` -->", f"<!-- end of {what} -->"


def replaced(text: str, begin: str, end: str, new: str) -> str:
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise RequestError(f"no place for the results; expected a line '{begin}' and a line '{end}'.")
    return f"{head}{begin}\n{new}\n{end}{tail}"


def write_whole(path: Path, text: str) -> None:
    """Write beside and rename, so that a killed run leaves the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_synced(path, text.encode())


def write_between(page: Path, begin: str, end: str, new: str) -> None:
    page.write_text(replaced(page.read_text(encoding="utf-8"), begin, end, new), encoding="utf-8")


def publish(text: str, page: Path | None, begin: str, end: str) -> None:
    """Print a text, and write it between two marks of a page if there is one."""
    sys.stdout.write(text.removesuffix("\n") + "\n")
    if page:
        write_between(page, begin, end, text)


def with_table(text: str) -> str:
    """Return the text with the tables of recipes and backends between the marks written anew."""
    # They import torch, and processes that a program starts begin with its peak of memory.
    from vlexport import build
    from vlexport.backends import backend_names, find_backend

    recipes = [
        (f"`{card.name}`", ", ".join(f"`{name}`" for name in card.model_types) or "any other", card.summary)
        for card in list_recipes()
    ]
    backends, default = [], signature(build).parameters["backend"].default
    for backend in map(find_backend, sorted(backend_names(), key=lambda name: name != default)):
        notes = ((each.spelled, f" ({each.note})" if each.note else "") for each in backend.capabilities)
        precisions = ", ".join(f"`{name}`{note}" for name, note in notes)
        extra = f"`vlexport[{backend.extra}]`" if backend.extra else "none"
        name = f"`{backend.name}`{', the default' if backend.name == default else ''}"
        backends.append((name, precisions, extra, backend.summary))
    lines = [
        *markdown(("recipe", "model types", "what it exports"), recipes),
        "",
        *markdown(("backend", "precision", "extra to install", "what it runs"), backends),
    ]
    return replaced(text, *marks("support table", "make docs"), "\n".join(lines))


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
