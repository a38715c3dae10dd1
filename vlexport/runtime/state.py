"""One request on its way through preprocess, encode, prune, embed, prefill and decode."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from vlexport.positions.rules import PromptPositions
from vlexport.positions.splice import Placeholder
from vlexport.runtime.outputs import STAGES, Encoded
from vlexport.runtime.request import Request, RequestLimits
from vlexport.specs import MediaItem

if TYPE_CHECKING:
    from vlexport.runtime.decoder import Turn
    from vlexport.runtime.request import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderInput:
    """An item to encode: its key if it may be cached, and its embeddings if they are known."""

    item: MediaItem
    key: bytes | None = None
    encoded: Encoded | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedPrompt:
    """The text of a prompt around its markers, and its media in prompt order with their kinds.

    `text` has one piece more than there are media. `is_chat`: the text holds its special tokens already.
    `hidden`: the characters behind the stand-ins of its `Shield`.
    """

    text: tuple[str, ...]
    kinds: tuple[str, ...]
    sources: tuple[Source, ...]
    is_chat: bool
    hidden: Mapping[str, str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedPrompt:
    """Ids of a prompt with room for every embedding, and the room of each item."""

    ids: tuple[int, ...]
    placeholders: tuple[Placeholder, ...]


@dataclass(kw_only=True, slots=True, repr=False)
class RequestState:
    """A request and its intermediate results; each step fills in its own fields.

    preprocess     limits: the request's and the operator's together; rate: share of video tokens to drop;
                   is_pruned: which rule positions follow; the prompt, and its media in prompt order
    encode, prune  encoded: embeddings of the media in prompt order
    embed          embeds [N, D] of the whole prompt and its positions
    prefill        turn: the decoder's sequence; logits [V] of the first token after the prompt
    """

    request: Request
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    limits: RequestLimits = field(init=False)
    rate: float = field(init=False)
    is_pruned: bool = field(init=False)
    marked: MarkedPrompt = field(init=False)
    media: tuple[EncoderInput, ...] = field(init=False)
    prompt: TokenizedPrompt = field(init=False)
    encoded: tuple[Encoded, ...] = field(init=False)
    embeds: Tensor = field(init=False)
    positions: PromptPositions = field(init=False)
    turn: Turn = field(init=False)
    logits: Tensor = field(init=False)

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Add the seconds of the block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started
