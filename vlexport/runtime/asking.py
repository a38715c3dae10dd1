"""The first stage: a request's pixels and words, read, checked and measured before anything is encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from vlexport.errors import InputError, LimitError
from vlexport.language import PromptItem
from vlexport.runtime.decoder import Decoder
from vlexport.runtime.encoder import Medium
from vlexport.runtime.prompts import Prompter
from vlexport.runtime.prune import Pruner
from vlexport.runtime.reading import MediaReader
from vlexport.runtime.requests import Request, RequestLimits
from vlexport.runtime.stages import Asked, Seen, Stopwatch

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport.runtime.requests import Source


class Asker:
    """Reads requests for one tower and one decoder."""

    def __init__(
        self, reader: MediaReader, pruner: Pruner, prompter: Prompter, decoder: Decoder, limits: RequestLimits
    ) -> None:
        self.reader = reader
        self.pruner = pruner
        self.prompter = prompter
        self.decoder = decoder
        self.limits = limits

    def ask(self, request: Request) -> Asked:
        """Everything that can be refused without the tower is refused here."""
        if not isinstance(request, Request):
            raise InputError(f"{type(request).__name__} given among the requests, a Request expected.")
        watch = Stopwatch()
        with watch.timing("preprocess"):
            limits = self.limits.lowered(request.limits) if request.limits else self.limits
            rate = self.pruner.check(request.prune)
            self._check_answer(request, limits)
            marked = self.prompter.mark(request, limits)
            media = [
                self._read(kind, source, request, limits)
                for kind, source in zip(marked.kinds, marked.sources, strict=True)
            ]
            is_pruned = rate > 0 or any(each.encoded and each.encoded.kept is not None for each in media)
            if is_pruned:
                for medium in media:
                    self.pruner.check_timed(medium.item)
            kept = [each.encoded.kept if each.encoded else None for each in media]
            prompt = self.prompter.expand(marked, self._items(media, kept, rate), limits)
            self._check_room(len(prompt.ids), request)
        return Asked(
            request=request,
            limits=limits,
            marked=marked,
            prompt=prompt,
            media=tuple(media),
            rate=rate,
            is_pruned=is_pruned,
            watch=watch,
        )

    def reword(self, seen: Seen) -> Seen:
        """Write the prompt of a pruned request again, with the rows that its masks left of each frame."""
        asked = seen.asked
        if not asked.is_pruned:
            return seen
        items = self._items(asked.media, [each.kept for each in seen.encoded], asked.rate)
        prompt = self.prompter.expand(asked.marked, items, asked.limits)
        self._check_room(len(prompt.ids), asked.request)
        return replace(seen, asked=replace(asked, prompt=prompt))

    def _read(self, kind: str, source: Source, request: Request, limits: RequestLimits) -> Medium:
        return self.reader.read(kind, source, request.fps, limits.media)

    def _items(self, media: Sequence[Medium], kept: Sequence[Tensor | None], rate: float) -> list[PromptItem]:
        numbers: Counter[str] = Counter()
        items = []
        for item, rows in zip((medium.item for medium in media), kept, strict=True):
            total = self.reader.tower.num_tokens(item)
            num_rows = self.pruner.num_kept(item, total, rate) if rows is None else len(rows)
            count_frames = partial(self.pruner.frame_rows, item, total, num_rows, rows)
            items.append(
                PromptItem(item=item, number=numbers[item.kind], num_rows=num_rows, count_frames=count_frames)
            )
            numbers[item.kind] += 1
        return items

    def _check_answer(self, request: Request, limits: RequestLimits) -> None:
        wanted = request.generation.max_new_tokens
        if wanted > limits.max_new_tokens:
            raise LimitError(
                f"max_new_tokens: {wanted} given, at most {limits.max_new_tokens} expected. Ask for less or "
                "raise RequestLimits.max_new_tokens."
            )

    def _check_room(self, num_tokens: int, request: Request) -> None:
        wanted = num_tokens + request.generation.max_new_tokens
        if wanted > self.decoder.max_tokens:
            raise LimitError(
                f"prompt of {num_tokens} tokens and an answer of up to {request.generation.max_new_tokens}: "
                f"{wanted} in all, the decoder takes {self.decoder.max_tokens}. Send smaller or fewer media, "
                "prune videos, or ask for a shorter answer."
            )
