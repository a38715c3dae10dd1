"""Errors raised by vlexport, and their exit codes on the command line.

Messages contain what was given, what was expected and what to do next.
"""

import difflib
import re
from collections.abc import Iterable

# Errors of Python and torch about unexpected values. MemoryError is not among them: it concerns the machine.
UNEXPECTED = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError,
)  # fmt: skip


class VlexportError(Exception):
    """Root of the tree; `exit_code` is the command line's; `temporary`: the request may succeed later."""

    exit_code = 1
    temporary = True


def code_of(error: type[VlexportError] | VlexportError) -> str:
    """Return the code of an error, which `vlexport explain` takes: words of its class, none of the root."""
    name = (error if isinstance(error, type) else type(error)).__name__
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name.removesuffix("Error")).lower().replace("vlexport", "")


def error_record(error: VlexportError) -> dict[str, object]:
    """Return an error as JSON has it."""
    return {
        "type": type(error).__name__,
        "code": code_of(error) or None,
        "message": str(error),
        "exit_code": error.exit_code,
    }


class InternalError(VlexportError):
    """A bug of vlexport or of a library, met by one request; the original error is its cause."""


class RequestError(VlexportError):
    """An invalid or unsupported request."""

    exit_code = 2
    temporary = False


class CheckpointError(RequestError):
    """A checkpoint that cannot be read or lacks what the recipe needs."""


class UnknownModelError(RequestError):
    """A model type without a recipe."""


class UnsupportedError(RequestError):
    """A combination of options that no backend or recipe supports."""


class MediaError(RequestError):
    """An image or video that cannot be read."""


class InputError(RequestError):
    """Tensors, grids or options that contradict each other."""


class ParityError(VlexportError):
    """A bundle that failed its accuracy check."""

    exit_code = 3
    temporary = False


class MisfitError(VlexportError):
    """A bundle for another machine, library version or recipe, or a library that is missing."""

    exit_code = 4


class BundleError(VlexportError):
    """A bundle that is corrupt."""

    exit_code = 5
    temporary = False


class NoBundleError(BundleError):
    """A path that is no bundle: a checkpoint, another folder, or nothing."""

    exit_code = 2


class UntrustedError(BundleError):
    """An intact bundle that was neither built here nor approved."""


class LimitError(VlexportError):
    """An input outside a profile or a limit."""

    exit_code = 6
    temporary = False


class ResourceError(VlexportError):
    """Lack of memory or disk space."""

    exit_code = 7


class LockedError(VlexportError):
    """An entry of the store that another build holds."""

    exit_code = 8


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` where a known name resembles this one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
