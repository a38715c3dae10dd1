"""What a request is between stages, and how long it was in each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from vlexport.positions.rules import PromptPositions
from vlexport.runtime.decoder import Turn
from vlexport.runtime.encoder import Medium
from vlexport.runtime.encoding import Encoded
from vlexport.runtime.prompts import Expanded, Marked
from vlexport.runtime.requests import Request, RequestLimits

STAGES = ("preprocess", "tower", "prune", "positions", "prefill", "decode")


class Stopwatch:
    """Seconds per stage of one request."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """After preprocessing: the prompt's ids with room for every embedding, and the media in prompt order.

    `limits` are the request's and the operator's together, `marked` is the prompt before its media had sizes,
    `rate` is the share to drop, 0 where nothing is; `is_pruned` says which rule positions follow.
    """

    request: Request
    limits: RequestLimits
    marked: Marked
    prompt: Expanded
    media: tuple[Medium, ...]
    rate: float
    is_pruned: bool
    watch: Stopwatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """After the tower, and again after pruning: embeddings of the media in prompt order."""

    asked: Asked
    encoded: tuple[Encoded, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Ready for the decoder: embeddings [N, D] of the whole prompt, and its positions."""

    seen: Seen
    embeds: Tensor
    positions: PromptPositions


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """After prefill: the decoder has read the prompt; logits [V] of what follows it."""

    placed: Placed
    turn: Turn
    logits: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReport:
    """What became of one image or video: its grid in patches, its tokens and how many were kept.

    `mask` says which, where pruning was on for a video.
    """

    kind: str
    grid: tuple[int, int, int]
    num_tokens: int
    num_kept: int
    seconds_per_grid: float | None = None
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a request gave.

    token_ids         generated ones, with the token that ended the answer
    finish            `end` (an end token), `stop` (a stop text) or `length`
    prompt_token_ids  after expansion; positions [rows, tokens] are over these
    delta             the n-th token of prompt and answer sits at n + delta
    stages            seconds: of each stage, `first_token` up to the first token, `per_token` after it
    """

    token_ids: tuple[int, ...]
    text: str
    finish: str
    prompt_token_ids: tuple[int, ...]
    positions: Tensor
    delta: int
    media: tuple[MediaReport, ...]
    stages: dict[str, float]

    @property
    def kept(self) -> tuple[int, ...]:
        """Tokens kept of each image and video, in prompt order."""
        return tuple(item.num_kept for item in self.media)

    def to_json(self) -> dict[str, object]:
        """JSON values only."""
        return {
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish": self.finish,
            "prompt_token_ids": list(self.prompt_token_ids),
            "positions": self.positions.tolist(),
            "delta": self.delta,
            "kept": list(self.kept),
            "media": [
                {"kind": item.kind, "grid": list(item.grid), "tokens": item.num_tokens, "kept": item.num_kept}
                for item in self.media
            ],
            "stages": dict(self.stages),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One generated token, and the text that became certain with it; the last text may come without one."""

    token_id: int | None
    text: str
