"""The command line: parse, call one public function, print."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress
from itertools import pairwise

import typer

from vlexport import system
from vlexport.cli import bench, build, bundles, check, hub, machine, new
from vlexport.cli.compare import compare
from vlexport.cli.encode import encode
from vlexport.cli.interrupts import STOPPED_CODES, Stopped, end_at_once, raise_again, stoppable
from vlexport.cli.options import Commands
from vlexport.cli.output import (
    EVENTS,
    failure,
    logs_printed,
    print_error,
    print_failure,
    print_line,
    show_json,
)
from vlexport.cli.run import run as answer
from vlexport.cli.sweep import sweep
from vlexport.cli.watch import watch
from vlexport.errors import MisfitError, RequestError, VlexportError

# Typer brings its own copy of click in newer versions; its public names lead to the classes of both.
_USAGE = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")

app = typer.Typer(
    name="vlexport",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=(
        "Exit codes: 0 success, 1 unexpected error, 2 invalid or unsupported request, "
        "3 accuracy check failed, 4 wrong machine or version, missing library, "
        "5 bundle corrupt or not trusted, 6 outside profile or limits, 7 out of memory or disk, "
        "8 locked by another build or run, 129/130/143 interrupted."
    ),
)


@app.callback(invoke_without_command=True)
def global_options(
    context: typer.Context,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print data and errors only; no progress."),  # noqa: ARG001
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Print what is done in detail."),  # noqa: ARG001
    debug: bool = typer.Option(False, "--debug", help="Print tracebacks too."),  # noqa: ARG001
    progress: str | None = typer.Option(  # noqa: ARG001
        None, metavar="json", help="Print progress to stderr as lines of JSON, for programs."
    ),
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    """Export vision towers of vision-language models to verified inference engines.

    -q, -v, --debug and --progress may stand anywhere, also after the command.
    """
    if version:
        import vlexport

        typer.echo(vlexport.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print_line(context.get_help())
        raise typer.Exit(2)


# In the order of the help.
for group, commands in {
    "Build": (machine.demo, build.plan, build.build),
    "Use": (encode, answer, watch, sweep, bench.bench),
    "Check": (check.inspect, check.check, check.report, compare, machine.explain),
    "Share": (hub.push, hub.pull, check.trust, check.repro),
    "This machine": (machine.list_, machine.doctor),
}.items():
    for command in commands:
        app.command(command.__name__.strip("_").replace("_", "-"), rich_help_panel=group)(command)
app.add_typer(new.app, rich_help_panel="Build")
for group_app in (bundles.bundles, bundles.cache):
    app.add_typer(group_app, rich_help_panel="This machine")


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    _open_streams()
    if hasattr(sys.stdout, "reconfigure"):
        # Paths are printed with the bytes that they have, whether or not these are text.
        sys.stdout.reconfigure(errors="surrogateescape")
    # Processes that libraries start, such as torch's compiler, import nothing from the current folder.
    os.environ.update(system.SAFE)
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code in STOPPED_CODES:
        # All is unwound.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        end_at_once(code)
    sys.exit(code)


def _open_streams() -> None:
    """Put an empty device where a shell has closed a stream: a file that is opened would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code; print errors as messages."""
    words, verbosity = _verbosity(arguments)
    try:
        with stoppable(), logs_printed(verbosity):
            try:
                words, is_for_programs = _events(words)
                token = EVENTS.set(is_for_programs)
                try:
                    code = int(app(words, prog_name="vlexport", standalone_mode=False) or 0)
                finally:
                    EVENTS.reset(token)
                # A check that a signal broke has failed.
                if code:
                    raise_again()
                return code
            except Exception as error:  # noqa: BLE001  whatever was raised becomes a message and an exit code
                # Libraries turn a signal into errors of their own.
                raise_again()
                return _report(error, words, debug=verbosity > 1)
    except Stopped as stop:
        # The terminal may be gone.
        with suppress(OSError):
            print_error(f"vlexport: {stop.message}")
        return stop.exit_code


_VERBOSITIES = {"-q": -1, "--quiet": -1, "-v": 1, "--verbose": 1, "--debug": 2}


def _verbosity(arguments: list[str]) -> tuple[list[str], int]:
    """Remove `-q`, `-v` and `--debug` from anywhere before `--`; return the rest and what they mean."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    levels = [_VERBOSITIES[word] for word in arguments[:end] if word in _VERBOSITIES]
    words = [word for word in arguments[:end] if word not in _VERBOSITIES]
    return [*words, *arguments[end:]], max(levels, default=0)


def _events(words: list[str]) -> tuple[list[str], bool]:
    """Remove `--progress json` from anywhere before `--`; return the rest and whether it was there."""
    end = words.index("--") if "--" in words else len(words)
    for at, word in enumerate(words[:end]):
        name, _, value = word.partition("=")
        if name == "--progress":
            length = 1 if value else 2
            form = value or "".join(words[at + 1 : min(end, at + 2)])
            if form != "json":
                raise RequestError(f"--progress {form}: json expected, or leave it out for a bar or lines.")
            return words[:at] + words[at + length :], True
    return words, False


def _report(error: Exception, words: list[str], *, debug: bool) -> int:
    code, message = _explain(error, words)
    if debug:
        traceback.print_exception(error)
    print_failure(error, message)
    if "--json" in words:
        show_json("error", {"error": failure(error, code, message)})
    return code


# Of a path that was given, or of the current folder.
_WRONG_PLACE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR,
}  # fmt: skip


def _explain(error: BaseException, words: list[str]) -> tuple[int, str]:
    if isinstance(error, VlexportError):
        return error.exit_code, str(error)
    if isinstance(error, _USAGE):
        return 2, _usage(error, words)
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package not in ("", "vlexport"):
        remedy = "`pip install vlexport` installs what is missing."
        return MisfitError.exit_code, f"the package '{package}' is not installed. {remedy}"
    short = system.shortage(error)
    if short is not None:
        return short.exit_code, str(short)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        if error.errno in _WRONG_PLACE:
            return 2, f"{where or 'the current folder: '}{error.strerror}. Give another place, or permission."
        return 1, f"{where}{error.strerror}. Nothing half-written is kept; see to the disk, then run again."
    name = type(error).__name__
    return 1, f"unexpected {name}: {error}. This is a bug; run again with --debug for the traceback."


# Verbs and options of earlier versions.
_REPLACED = {
    "verify": "`vlexport check`",
    "parity": "`vlexport check --accuracy`",
    "diff": "`vlexport compare`",
    "export-inputs": "`vlexport repro --inputs-only`",
    "completion": "an option: `vlexport --help`",
    "against": "--checkpoint",
    "decoder": "--checkpoint",
    "trust": "`vlexport trust BUNDLE DIGEST`",
}


def _usage(error: BaseException, words: list[str]) -> str:
    text = " ".join(str(getattr(error, "format_message", error.__str__)()).split()).rstrip(". ")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "vlexport"
    for name, now in _REPLACED.items():
        if f"command '{name}'" in text or f"option: --{name}" in text:
            return f"{name} is now {now}. See `vlexport --help`."
    option = getattr(error, "param", None)
    names = option.opts if option is not None else []
    pairs = [*pairwise(words), *(word.split("=", 1) for word in words if "=" in word)]
    entered = next((value for name, value in pairs if name in names), None)
    if entered is not None and entered not in text:
        text = text.replace(": ", f": {entered!r} given. ", 1)
    return f"{text}{'' if text.endswith('?') else '.'} See `{path} --help`."
