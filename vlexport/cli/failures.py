"""Exit codes and messages of errors."""

from __future__ import annotations

import typer

from vlexport.errors import VlexportError

# Typer brings its own copy of click in newer versions; its public names lead to the classes of both.
_USAGE = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message of any error."""
    if isinstance(error, VlexportError):
        return error.exit_code, str(error)
    if isinstance(error, _USAGE):
        return 2, _usage(error)
    from vlexport.bundle.os_errors import shortage

    short = shortage(error)
    if short is not None:
        return short.exit_code, str(short)
    name = type(error).__name__
    return 1, f"unexpected {name}: {error}. This is a bug; run again with --debug for the traceback."


def _usage(error: BaseException) -> str:
    words = str(getattr(error, "format_message", error.__str__)()).rstrip(". ")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "vlexport"
    return f"{words}. See `{path} --help`."
