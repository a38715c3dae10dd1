"""The first stage: a request's pixels and words, read, checked and measured before anything is encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlexport.errors import LimitError
from vlexport.language import PromptItem
from vlexport.runtime.decoder import Decoder
from vlexport.runtime.encoder import Medium
from vlexport.runtime.placing import Pruner
from vlexport.runtime.prompts import Prompter
from vlexport.runtime.reading import MediaReader
from vlexport.runtime.requests import Request, RequestLimits
from vlexport.runtime.stages import Asked, Stopwatch

if TYPE_CHECKING:
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
            prompt = self.prompter.expand(marked, self._items(media, rate), limits)
            self._check_room(len(prompt.ids), request)
        return Asked(
            request=request, prompt=prompt, media=tuple(media), rate=rate, is_pruned=is_pruned, watch=watch
        )

    def _read(self, kind: str, source: Source, request: Request, limits: RequestLimits) -> Medium:
        return self.reader.read(kind, source, request.fps, limits.media)

    def _items(self, media: Sequence[Medium], rate: float) -> list[PromptItem]:
        numbers: Counter[str] = Counter()
        items = []
        for medium in media:
            item, known = medium.item, medium.encoded
            total = self.reader.tower.num_tokens(item)
            num_rows = self.pruner.num_kept(item, total, rate)
            if known is not None and known.kept is not None:
                num_rows = len(known.kept)
            items.append(PromptItem(item=item, number=numbers[item.kind], num_rows=num_rows))
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
