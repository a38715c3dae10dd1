"""The border to libraries that get the values of a checkpoint: what they raise becomes one error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vlexport.errors import UNEXPECTED, CheckpointError

if TYPE_CHECKING:
    from vlexport.checkpoint.checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])

_MEMORY = ("allocate", "out of memory")
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_LIBRARIES = frozenset({"transformers", "tokenizers", "safetensors", "huggingface_hub"})


@contextmanager
def refused_as_checkpoint(where: object) -> Iterator[None]:
    """Raise a `CheckpointError` about `where` in place of what a library raises about its values.

    A bug in a recipe or in vlexport surfaces as it is.
    """
    try:
        yield
    except (*UNEXPECTED, _strict_fields()) as error:
        if any(word in str(error).lower() for word in _MEMORY) or not _of_library(error):
            raise
        words = " ".join(str(error).split())[:400]
        raise CheckpointError(
            f"{where}: its settings do not make a model ({type(error).__name__}: {words}). Expected the "
            "files of one released checkpoint. Download them again."
        ) from error


def _of_library(error: BaseException) -> bool:
    """Return whether the innermost code of ours or of these libraries that the error passed is a library's.

    torch counts where it loads weights only: elsewhere it raises what its caller, our tower, does wrong.
    """
    found, trace = False, error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top in _LIBRARIES or (top == "torch" and frame.f_code.co_name == "load_state_dict"):
            found = True
        elif top == "vlexport" or not _is_installed(top, frame.f_code.co_filename):
            found = False
    return found


def _is_installed(top: str, file: str) -> bool:
    """Return whether a module is of Python or of an installed package; a private recipe is not."""
    return top in sys.stdlib_module_names or not _PACKAGES.isdisjoint(Path(file).parts)


def _strict_fields() -> type[Exception]:
    # Imported once something was raised: a config that is in order costs no import.
    from huggingface_hub.errors import StrictDataclassError

    return StrictDataclassError


def at_border(read: F) -> F:
    """Wrap a function whose first argument is a checkpoint in `refused_as_checkpoint`."""

    @wraps(read)
    def guarded(checkpoint: Checkpoint, *rest: Any, **named: Any) -> Any:
        with refused_as_checkpoint(checkpoint.path / "config.json"):
            return read(checkpoint, *rest, **named)

    # The signature stays that of `read`.
    return guarded  # type: ignore[return-value]
