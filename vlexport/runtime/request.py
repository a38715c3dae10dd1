"""Requests, how their answers are generated, their limits, and their state from preprocess to decode."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypedDict, TypeGuard

from vlexport.codec import check_fields, check_text, texts_in
from vlexport.errors import InputError, nearest
from vlexport.media import MediaLimits
from vlexport.positions.rules import check_rate
from vlexport.pruning.cells import CellChoice, Pruning
from vlexport.runtime.outputs import STAGES, Encoded
from vlexport.specs import MediaItem, MethodName, Pixels, check_frame_rate

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

    from vlexport.positions.rules import PromptPositions
    from vlexport.positions.splice import Placeholder
    from vlexport.runtime.decoder import Turn

    ImageSource = str | Path | bytes | BinaryIO | Image | np.ndarray | Tensor | Pixels
    VideoSource = str | Path | bytes | BinaryIO | np.ndarray | Tensor | Pixels | Sequence[ImageSource]
    Source = ImageSource | VideoSource | MediaItem | Encoded
    Message = Mapping[str, object]
else:
    # Checked by what reads them.
    Source = Message = object


class PruningKeywords(TypedDict, total=False):
    """Keywords of both."""

    prune: float | None
    method: MethodName | None
    prune_before: float | str | None


class MediaOptions(PruningKeywords, total=False):
    """Keywords of `Pipeline.encode`."""

    images: ImageSource | Iterable[ImageSource]
    videos: VideoSource | Iterable[VideoSource]
    fps: float | None
    limits: MediaLimits | None


class GenerationKeywords(TypedDict, total=False):
    """Fields of `Generation`."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_end: bool
    prefill_chunk: int | None


class RequestOptions(PruningKeywords, GenerationKeywords, total=False):
    """Keywords of `Pipeline.generate`."""

    images: Source | Iterable[Source]
    videos: Source | Iterable[Source]
    fps: float | None
    allow_special_tokens: bool
    limits: RequestLimits | None
    generation: Generation | None


KINDS = ("image", "video")
# Fields of `RequestLimits` that are numbers.
COUNTS = ("max_items", "max_prompt_tokens", "max_new_tokens")
# Each is looked for behind every token.
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
NOTHING = "nothing to encode: at least one image or video is expected. Pass images or videos."


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Settings of generation; temperature 0 takes the likeliest token.

    top_k 0 and top_p 1 leave nothing out. `stop` texts end an answer and are cut off; `stop_token_ids` end
    it like the model's own end tokens, which `ignore_end` disregards. `prefill_chunk` is the most prompt
    tokens that the decoder takes at once.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        is_normal = self.temperature == 0 or self.temperature >= sys.float_info.min
        _check(is_normal, "temperature", self.temperature, f"0, or {sys.float_info.min:.1e} or more")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "0 < top_p <= 1")
        _check(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (all tokens) or more")
        _check(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2**63 - 1")
        _check(all(self.stop), "stop", list(self.stop), "texts that are not empty")
        longest = max(map(len, self.stop), default=0)
        _check(
            len(self.stop) <= MAX_STOPS and longest <= MAX_STOP_CHARACTERS,
            "stop",
            f"{len(self.stop)} texts of up to {longest} characters",
            f"at most {MAX_STOPS} of {MAX_STOP_CHARACTERS}",
        )
        _check(
            len(self.stop_token_ids) <= MAX_STOPS,
            "stop_token_ids",
            f"{len(self.stop_token_ids)} ids",
            f"at most {MAX_STOPS}",
        )
        chunk = self.prefill_chunk
        _check(chunk is None or 1 <= chunk < 2**31, "prefill_chunk", chunk, "1 or more tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Ceilings for one request, set by the operator; a request may only lower them.

    `max_prompt_tokens` is of the expanded prompt; `max_items` counts images and videos.
    """

    media: MediaLimits = field(default_factory=MediaLimits)
    max_items: int = 64
    max_prompt_tokens: int = 131072
    max_new_tokens: int = 16384

    def __post_init__(self) -> None:
        check_fields(self)
        for name in COUNTS:
            _check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")

    def lowered(self, to: RequestLimits) -> RequestLimits:
        counts = {name: min(getattr(self, name), getattr(to, name)) for name in COUNTS}
        return RequestLimits(media=self.media.lowered(to.media), **counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One question, put in exactly one of three ways, with its media.

    prompt      a plain question: a user's turn with all images, then all videos, then this text
    messages    a chat; media parts hold their source (`{"type": "image", "image": SOURCE}`) or take the
                next one of `images` or `videos`
    raw_prompt  the prompt as the tokenizer sees it, with one placeholder for each item
    images      sources of pixels, preprocessed items, or embeddings as `encode` gives them
    fps         rate of frames that have none: of arrays their own, of files the one to sample at
    prune       share of tokens to drop after the tower; `method` says by what, by default the bundle's
    prune_before  which cells the tower gets (pruning/cells.py): `static:0.7`, `predicted`, ..., or a rate,
                  which is that of `static`
    allow_special_tokens  special tokens that are written in a prompt or in messages count as such; by default
                          they are plain text. A raw_prompt always holds its own special tokens
    """

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    raw_prompt: str | None = None
    images: Sequence[Source] = ()
    videos: Sequence[Source] = ()
    image_embeds: Sequence[Encoded] = ()
    video_embeds: Sequence[Encoded] = ()
    fps: float | None = None
    prune: float | None = None
    method: str | None = None
    prune_before: float | str | None = None
    allow_special_tokens: bool = False
    limits: RequestLimits | None = None
    generation: Generation = field(default_factory=Generation)

    def __post_init__(self) -> None:
        for name in ("images", "videos"):
            object.__setattr__(self, name, many(getattr(self, name)))
        ways = {"prompt": self.prompt, "messages": self.messages, "raw_prompt": self.raw_prompt}
        present = [name for name, value in ways.items() if value is not None]
        if len(present) != 1:
            raise InputError(
                f"{' and '.join(present) or 'no question'} given; exactly one of prompt, messages and "
                f"raw_prompt expected. {'Leave the others out' if present else 'Pass one'}."
            )
        for kind in KINDS:
            both = (getattr(self, f"{kind}s"), getattr(self, f"{kind}_embeds"))
            if all(isinstance(sources, Sequence) and sources for sources in both):
                raise InputError(
                    f"{kind}s and {kind}_embeds given; their order in the prompt would be unclear. "
                    f"Put embeddings into {kind}s, at their place."
                )
        check_fields(self)
        for text in texts_in(self.messages):
            check_text("messages", text)
        _check(self.raw_prompt != "", "raw_prompt", repr(self.raw_prompt), "a text that is not empty")
        _check(self.messages != (), "messages", self.messages, "at least one message")
        check_media_options(self.fps, self.prune, self.prune_before)

    @classmethod
    def of(
        cls,
        question: object,
        *,
        generation: Generation | None = None,
        **options: Any,
    ) -> Self:
        known = sorted(RequestOptions.__optional_keys__)
        for name in options:
            if name not in known:
                raise InputError(
                    f"{name}: no keyword of a question.{nearest(name, known)} Known: {', '.join(known)}."
                )
        sampling = {
            name: options[name]
            for name in options.keys() & GenerationKeywords.__optional_keys__
            if options[name] is not None
        }
        parts = {name: options[name] for name in options.keys() - GenerationKeywords.__optional_keys__}
        if isinstance(question, cls):
            given = {**parts, **sampling, "generation": generation}
            present = sorted(name for name, value in given.items() if value is not None and many(value) != ())
            if present:
                raise InputError(
                    f"a Request and {', '.join(present)} given; put everything into the Request."
                )
            return question
        if generation is not None and sampling:
            raise InputError(
                f"generation and {', '.join(sorted(sampling))} given; put everything into one of them."
            )
        chosen = generation or Generation(**sampling)
        if isinstance(question, str):
            return cls(prompt=question, generation=chosen, **parts)
        if isinstance(question, Sequence):
            return cls(messages=question, generation=chosen, **parts)
        kind = "nothing" if question is None else type(question).__name__
        raise InputError(f"question: {kind} given, a text, a list of messages or a Request expected.")

    def sources(self, kind: str) -> tuple[Source, ...]:
        passed: Sequence[Source] = self.images if kind == "image" else self.videos
        return tuple(passed) or tuple(self.image_embeds if kind == "image" else self.video_embeds)


def is_iterator(sources: object) -> TypeGuard[Iterator[Any]]:
    """Return whether sources come one by one; an open file is one by itself."""
    return isinstance(sources, Iterator) and not isinstance(sources, io.IOBase)


def many(sources: Source | Iterable[Source]) -> Sequence[Source]:
    """Return the items of a list, a tuple or an iterator; anything else is one item by itself."""
    if is_iterator(sources):
        return tuple(sources)
    return sources if isinstance(sources, list | tuple) else (sources,)


def check_media_options(fps: float | None, prune: float | None, prune_before: float | str | None) -> None:
    """Refuse a frame rate or pruning that no family takes."""
    if fps is not None:
        check_frame_rate(fps)
    if prune is not None:
        check_rate(prune)
    if prune_before is not None:
        CellChoice.of(prune_before)


def _check(is_fine: bool, name: str, value: object, expected: str) -> None:
    if not is_fine:
        raise InputError(f"{name}: {value} given, {expected} expected.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderInput:
    """An item to encode: its key if it may be cached, and its embeddings if they are known.

    kept  tokens that stay after the tower, where they are chosen by pixels
    form  in which cells were chosen
    """

    item: MediaItem
    key: bytes | None = None
    encoded: Encoded | None = None
    kept: Tensor | None = None
    form: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedPrompt:
    """The text of a prompt around its markers, and its media in prompt order with their kinds.

    `text` has one piece more than there are media. `is_chat`: the text holds its special tokens already.
    `hidden`: the characters behind the placeholders of its `Shield`.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLevels:
    """Further outputs of a tower, [levels, rows, width], and the prompt's column of each row on the host."""

    rows: Tensor
    columns: Tensor

    def between(self, start: int, stop: int) -> tuple[Tensor, ...]:
        import torch

        from vlexport.positions.splice import deepstack_tables
        from vlexport.vision.static_shapes import to_device

        first, last = torch.searchsorted(self.columns, torch.tensor([start, stop])).tolist()
        if first == last:
            return ()
        columns = to_device(self.columns[first:last] - start, self.rows.device)
        return (deepstack_tables(self.rows[:, first:last], columns, stop - start),)


@dataclass(kw_only=True, slots=True, repr=False)
class RequestState:
    """A request and its intermediate results; each step fills in its own fields.

    forms          in which pruning and positions ran
    preprocess     limits: the request's and the operator's together; pruning: which tokens are dropped;
                   is_pruned: which rule positions follow; the prompt, and its media in prompt order
    encode, prune  encoded: embeddings of the media in prompt order
    preprocess     inputs of a whole model, which embeds and places the prompt itself
    embed          embeds [N, D] of the whole prompt, its positions, and the levels of its media
    prefill        turn: the decoder's sequence; logits [V] of the first token after the prompt
    """

    request: Request
    forms: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    limits: RequestLimits = field(init=False)
    pruning: Pruning = field(init=False)
    is_pruned: bool = False
    marked: MarkedPrompt = field(init=False)
    media: tuple[EncoderInput, ...] = field(init=False)
    prompt: TokenizedPrompt = field(init=False)
    inputs: Mapping[str, Any] = field(init=False)
    encoded: tuple[Encoded, ...] = field(init=False)
    embeds: Tensor = field(init=False)
    positions: PromptPositions = field(init=False)
    levels: MediaLevels | None = None
    turn: Turn = field(init=False)
    logits: Tensor = field(init=False)

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        from torch.profiler import record_function

        started = time.perf_counter()
        try:
            with record_function(stage):
                yield
        finally:
            self.seconds[stage] += time.perf_counter() - started
