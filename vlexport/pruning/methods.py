"""The pruning methods by name."""

from __future__ import annotations

from vlexport.errors import UnsupportedError, nearest
from vlexport.pruning.divprune import DivPruneSelector
from vlexport.pruning.evs import EvsSelector
from vlexport.pruning.selectors import Selector
from vlexport.pruning.vidcom2 import VidCom2Selector

METHODS: dict[str, Selector] = {
    selector.name: selector
    for selector in (EvsSelector(), EvsSelector(ties="snap"), VidCom2Selector(), DivPruneSelector())
}
# Those by which a request may prune. No bundle has a graph of `relevance`, which depends on the question, or
# of `evs-frames`, which is for streams: of two frames at a time.
REQUESTED: dict[str, Selector] = {
    **METHODS,
    "evs-frames": EvsSelector(ties="snap", by_frame=True),
    "relevance": DivPruneSelector(asks=True),
}


def find_method(name: str) -> Selector:
    """Return the selector of this name."""
    if name not in METHODS:
        raise UnsupportedError(
            f"no pruning method '{name}'.{nearest(name, METHODS)} There are: {', '.join(sorted(METHODS))}."
        )
    return METHODS[name]
