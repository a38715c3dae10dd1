"""Errors of libraries that get the values of a checkpoint, as errors about the checkpoint."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from vlexport.errors import UNEXPECTED, CheckpointError

F = TypeVar("F", bound=Callable[..., Any])

_MEMORY = ("allocate", "out of memory")
_LIBRARIES = frozenset({"transformers", "tokenizers", "safetensors", "huggingface_hub"})


@contextmanager
def checkpoint_errors(where: object) -> Iterator[None]:
    """Raise a `CheckpointError` about `where` in place of what a library raises; our bugs stay."""
    try:
        yield
    except Exception as error:
        # Imported once something was raised: a config that is in order costs no import.
        from huggingface_hub.errors import StrictDataclassError

        ours = not isinstance(error, (*UNEXPECTED, StrictDataclassError)) or not _is_of_library(error)
        if ours or any(word in str(error).lower() for word in _MEMORY):
            raise
        words = " ".join(str(error).split())[:400]
        raise CheckpointError(
            f"{where}: its settings do not make a model ({type(error).__name__}: {words}). Expected the "
            "files of one released checkpoint. Download them again."
        ) from error


def _is_of_library(error: Exception) -> bool:
    """Return whether the innermost code of ours or of these libraries that the error passed is a library's.

    torch counts where it loads weights only: elsewhere it raises what its caller, our tower, does wrong. A
    private recipe is in no package, and ours.
    """
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top in _LIBRARIES or (top == "torch" and frame.f_code.co_name == "load_state_dict"):
            return True
        packages = {"site-packages", "dist-packages"} & {*Path(frame.f_code.co_filename).parts}
        if top == "vlexport" or not (packages or top in sys.stdlib_module_names):
            return False
    return False


def reads_checkpoint(read: F) -> F:
    """Wrap a function whose first argument is a checkpoint in `checkpoint_errors`."""

    @wraps(read)
    def guarded(checkpoint: Any, *rest: Any, **named: Any) -> Any:
        with checkpoint_errors(checkpoint.path / "config.json"):
            return read(checkpoint, *rest, **named)

    # The signature stays that of `read`.
    return guarded  # type: ignore[return-value]
