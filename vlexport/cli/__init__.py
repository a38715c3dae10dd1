"""The command line: parse, call one public function, print."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import traceback
from types import FrameType

import click
import typer

from vlexport.cli import build, bundles, demo, encode, machine
from vlexport.cli.output import say, show_json
from vlexport.errors import VlexportError

app = typer.Typer(
    name="vlexport",
    help="Verified engines from the vision half of vision-language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=(
        "Exit codes: 0 fine, 1 unexpected, 2 request cannot be served, 3 parity failed, 4 wrong machine or "
        "version, 5 bundle corrupt or not trusted, 6 outside profile or limits, 7 out of memory or disk, "
        "8 locked by another build, 130/143 interrupted."
    ),
)


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    """Options that stand before the verb."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, stream=sys.stderr)
    if version:
        import vlexport

        typer.echo(vlexport.__version__)
        raise typer.Exit


for group in (machine, build, bundles, encode, demo):
    group.register(app)


class _Terminated(BaseException):
    """SIGTERM, raised where the program stands, so that staged work is removed on the way out."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave the process with its exit code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run a command; every error becomes a message and an exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        return int(stop.exit_code)
    except (KeyboardInterrupt, click.exceptions.Abort):
        say("vlexport: interrupted; nothing was left behind.")
        return 130
    except _Terminated:
        say("vlexport: terminated; nothing was left behind.")
        return 143
    except Exception as error:  # noqa: BLE001  the last stop before the shell
        return _report(error, arguments)


def _report(error: Exception, arguments: list[str]) -> int:
    code, message = _explain(error)
    if "--debug" in arguments:
        traceback.print_exception(error)
    if "--json" in arguments:
        show_json("error", {"error": {"type": type(error).__name__, "message": message, "exit_code": code}})
    say(f"vlexport: {message}")
    return code


def _explain(error: Exception) -> tuple[int, str]:
    if isinstance(error, VlexportError):
        return error.exit_code, str(error)
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        where = f" See `{context.command_path} --help`." if context else ""
        return 2, error.format_message() + where
    if isinstance(error, MemoryError):
        return 7, "out of memory. Send less at once, choose a smaller profile, or free memory."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return 7, f"disk full: {error}. Free space or choose another folder."
    name = type(error).__name__
    return 1, f"unexpected {name}: {error}. Run again with --debug before the verb for the traceback."


def _terminate(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise _Terminated
