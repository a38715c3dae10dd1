"""Output of commands: data on stdout, messages on stderr, one schema for `--json`."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vlexport.codec import encode
from vlexport.errors import VlexportError

ProgressCall = Callable[[str, float], None]

SCHEMA = 1


def say(text: str) -> None:
    """Print a line for people on stderr."""
    _console(stderr=True).print("\n".join(map(_harmless, text.split("\n"))), soft_wrap=True)


def show(text: str, end: str = "\n") -> None:
    """Print data on stdout, unchanged and flushed; a closed pipe, as behind `head`, is no error."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered must not be tried again at the end of the process.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            raise


def show_json(verb: str, content: object) -> None:
    """Print one JSON object on stdout; `schema` and `verb` identify its layout."""
    document = {"schema": SCHEMA, "verb": verb, **encode(content)}
    show(json.dumps(document, indent=2, allow_nan=False))


@contextmanager
def data_is_out() -> Iterator[None]:
    """Report errors of the block on stderr only, because stdout has its data already."""
    try:
        yield
    except VlexportError as error:
        say(f"vlexport: {error}")
        raise typer.Exit(error.exit_code) from error


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; columns separated by tabs if stdout is no terminal."""
    lines = [[_harmless(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (columns, *lines):
            show("\t".join(line))
        return
    table = Table(*columns, highlight=False)
    for line in lines:
        table.add_row(*line)
    _console(stderr=False).print(table)


def _console(*, stderr: bool) -> Console:
    """Return a console without markup, emoji codes and highlighting."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def _harmless(text: str) -> str:
    """Escape control characters: names from elsewhere must not control a terminal."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text
    )


@contextmanager
def phases(title: str) -> Iterator[ProgressCall]:
    """Show a progress bar on a terminal; elsewhere print a line for every phase."""
    console = _console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _plain()
        return
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


class _Narration(logging.Handler):
    """Log handler that prints to stderr; of other libraries only errors, or warnings when debugging."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self.lowest = {True: logging.DEBUG if debug else logging.INFO}
        self.lowest[False] = logging.WARNING if debug else logging.ERROR

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= self.lowest[record.name.startswith("vlexport")]:
            say(self.format(record))


@contextmanager
def narrated(*, debug: bool) -> Iterator[None]:
    """Print log records of the library to stderr for the length of one command."""
    handler, ours, top = _Narration(debug=debug), logging.getLogger("vlexport"), logging.getLogger()
    before = ours.level
    top.addHandler(handler)
    ours.setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(before)
        top.removeHandler(handler)
