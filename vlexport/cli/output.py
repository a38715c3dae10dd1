"""Output of commands: data on stdout, messages on stderr, one schema for `--json`."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vlexport.codec import encode
from vlexport.errors import VlexportError, code_of
from vlexport.system import shortage

SCHEMA = 1
# The console of the bar that is shown: it prints above its bar, any other would leave a copy of the bar.
UNDER_BAR: list[Console] = []
# -1 with --quiet, 1 with --verbose, 2 with --debug, of the command that runs.
LEVELS = {-1: logging.ERROR, 0: logging.INFO, 1: logging.DEBUG, 2: 1}
VERBOSITY: ContextVar[int] = ContextVar("verbosity", default=0)
# Whether progress is printed for programs.
EVENTS: ContextVar[bool] = ContextVar("events", default=False)


def is_quiet() -> bool:
    return VERBOSITY.get() < 0


def is_verbose() -> bool:
    return VERBOSITY.get() > 0


def print_line(text: str) -> None:
    """Print a line for people on stderr, unless the command is quiet."""
    if not is_quiet():
        print_error(text)


def print_error(text: str) -> None:
    console_of(stderr=True).print("\n".join(map(_harmless, text.split("\n"))), soft_wrap=True)


def print_failure(error: Exception, message: str) -> None:
    """Print what ended a command, after the code that `vlexport explain` takes."""
    code = _code(error)
    print_error(f"vlexport: {code and f'[{code}] '}{message}")


def _code(error: Exception) -> str:
    typed = error if isinstance(error, VlexportError) else shortage(error)
    return code_of(typed) if typed else ""


def show(text: str | bytes, end: str = "\n") -> None:
    """Print data on stdout, unchanged and flushed; a closed pipe, as behind `head`, is no error.

    Bytes have no end of a line.
    """
    try:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
            sys.stdout.write(text + end)
        sys.stdout.flush()
    except OSError as error:
        _write_nowhere(sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            raise


def _write_nowhere(number: int) -> None:
    """Lead a stream elsewhere: what is buffered must not be tried again at the end of the process."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), number)


def show_json(verb: str, content: object, indent: int | None = 2) -> None:
    """Print one JSON object on stdout; `schema` and `verb` identify its layout."""
    document = {"schema": SCHEMA, "verb": verb, **encode(content)}
    show(json.dumps(document, indent=indent, allow_nan=False))


def failure(error: Exception, exit_code: int, message: str) -> dict[str, object]:
    return {
        "type": type(error).__name__,
        "code": _code(error) or None,
        "message": message,
        "exit_code": exit_code,
    }


@contextmanager
def data_is_out() -> Iterator[None]:
    """Report errors of the block on stderr only, because stdout has its data already."""
    try:
        yield
    except VlexportError as error:
        print_failure(error, str(error))
        raise typer.Exit(error.exit_code) from error


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, stderr: bool = False) -> None:
    """Print a table on stdout; columns separated by tabs if stdout is no terminal.

    stderr  print it there, for people: columns separated by two spaces
    """
    if stderr and is_quiet():
        return
    lines = [[_harmless(cell) for cell in row] for row in rows]
    if not (sys.stderr if stderr else sys.stdout).isatty():
        for line in (columns, *lines):
            print_error("  ".join(line)) if stderr else show("\t".join(line))
        return
    # Digests, paths and commands are copied from here: all of them, in several lines where they are long.
    table = Table(*(Column(name, overflow="fold") for name in columns), highlight=False)
    for line in lines:
        table.add_row(*line)
    console_of(stderr=stderr).print(table)


_COLORS = {"passed": "green", "observed|not_run": "yellow", "failed|blocked": "bold red"}


def show_report(text: str, *, stderr: bool = False) -> None:
    """Print an accuracy report; on a terminal a verdict at the end of a line has its colour."""
    console = console_of(stderr=stderr)
    if stderr and is_quiet():
        return
    if not console.is_terminal:
        (print_error if stderr else show)(text)
        return
    colored = Text("\n".join(map(_harmless, text.split("\n"))))
    for verdict, color in _COLORS.items():
        colored.highlight_regex(rf"(?m)\b({verdict})$", color)
    console.print(colored, soft_wrap=True)


def console_of(*, stderr: bool) -> Console:
    """Return a console without markup, emoji codes and highlighting."""
    if stderr and UNDER_BAR:
        return UNDER_BAR[-1]
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False)


class _Console(Console):
    """A console whose reader may leave, as behind `head`: the rest is written nowhere."""

    def on_broken_pipe(self) -> None:
        _write_nowhere(self.file.fileno())


def _harmless(line: str) -> str:
    """Escape control characters: names from elsewhere must not control a terminal."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line)


@contextmanager
def logs_printed(verbosity: int) -> Iterator[None]:
    """Print log records to stderr for the length of one command; of other libraries only errors.

    With --debug, warnings of other libraries too.
    """
    ours, top = logging.getLogger("vlexport"), logging.getLogger()
    lowest = {True: LEVELS[verbosity], False: logging.WARNING if verbosity > 1 else logging.ERROR}

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= lowest[record.name.startswith("vlexport")]:
                print_error(self.format(record))

    handler, level, token = Printer(), ours.level, VERBOSITY.set(verbosity)
    top.addHandler(handler)
    ours.setLevel(LEVELS[verbosity])
    try:
        yield
    finally:
        VERBOSITY.reset(token)
        ours.setLevel(level)
        top.removeHandler(handler)
