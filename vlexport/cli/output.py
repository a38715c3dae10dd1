"""What commands print: data on stdout, narration on stderr, one schema for `--json`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

ProgressCall = Callable[[str, float], None]

SCHEMA = 1


def say(text: str) -> None:
    """A line for people, on stderr."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(text)


def show(text: str) -> None:
    """Data, on stdout, as it is."""
    sys.stdout.write(text + "\n")


def show_json(verb: str, content: Mapping[str, object]) -> None:
    """One JSON object on stdout; `schema` and `verb` say how to read it."""
    document = {"schema": SCHEMA, "verb": verb, **content}
    # Manifests hold read-only mappings, which json knows nothing of.
    show(json.dumps(document, indent=2, allow_nan=False, default=dict))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; plain columns where stdout is no terminal."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            show("\t".join(row))
        return
    table = Table(*columns, highlight=False)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


@contextmanager
def phases(title: str) -> Iterator[ProgressCall]:
    """A bar with phase and time on a terminal; elsewhere a plain line for every phase."""
    if not sys.stderr.isatty():
        yield _plain()
        return
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def advance(phase: str, share: float) -> None:
            bar.update(task, description=phase, completed=share)

        yield advance


def _plain() -> ProgressCall:
    started, last = time.monotonic(), ""

    def advance(phase: str, share: float) -> None:  # noqa: ARG001
        nonlocal last
        if phase != last:
            last = phase
            say(f"{time.monotonic() - started:6.1f} s  {phase}")

    return advance
