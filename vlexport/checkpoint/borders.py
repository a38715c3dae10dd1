"""The border to libraries that are given the values of a checkpoint: what they raise becomes one error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from vlexport.errors import UNEXPECTED, CheckpointError

if TYPE_CHECKING:
    from vlexport.checkpoint.checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])

_MEMORY = ("allocate", "out of memory")


@contextmanager
def refused_as_checkpoint(where: object) -> Iterator[None]:
    """Raise a `CheckpointError` about `where` in place of what a library raises about its values."""
    try:
        yield
    except (*UNEXPECTED, _strict_fields()) as error:
        if any(word in str(error).lower() for word in _MEMORY):
            raise
        words = " ".join(str(error).split())[:400]
        raise CheckpointError(
            f"{where}: its settings do not make a model ({type(error).__name__}: {words}). Expected the "
            "files of one released checkpoint. Download them again."
        ) from error


def _strict_fields() -> type[Exception]:
    # Looked for once something was raised: a config that is in order costs no import.
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
