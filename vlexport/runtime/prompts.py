"""From a request to token ids with room for the embeddings of its media."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlexport.errors import InputError, LimitError
from vlexport.fields import texts_in
from vlexport.language import PromptItem, PromptRule
from vlexport.positions.splice import Placeholder
from vlexport.runtime.chat import chat_of
from vlexport.runtime.requests import KINDS, Request, RequestLimits
from vlexport.runtime.tokenizer import Shield, Tokenizer

if TYPE_CHECKING:
    from vlexport.runtime.requests import Source

# No tokenizer needs this many characters for a token on average.
MAX_CHARACTERS_PER_TOKEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Marked:
    """A prompt's text round its markers, and the media in prompt order with their kinds.

    `text` has one piece more than there are media. `is_chat`: the text holds its special tokens already.
    `hidden`: what the stand-ins of its `Shield` stand for.
    """

    text: tuple[str, ...]
    kinds: tuple[str, ...]
    sources: tuple[Source, ...]
    is_chat: bool
    hidden: Mapping[str, str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Expanded:
    """Ids of a prompt with room for every embedding, and where the room of each item is."""

    ids: tuple[int, ...]
    placeholders: tuple[Placeholder, ...]


class Prompter:
    """Marks and expands prompts by one rule."""

    def __init__(
        self, tokenizer: Tokenizer, rule: PromptRule[Any], expand: Callable[[PromptItem], str]
    ) -> None:
        self.tokenizer = tokenizer
        self.rule = rule
        self.expand_item = expand
        self.slots = {kind: tokenizer.id_of(token) for kind, token in rule.slots.items()}
        self.kind_of = {marker: kind for kind, marker in rule.markers.items()}
        self.marker = re.compile("|".join(f"({re.escape(marker)})" for marker in self.kind_of))

    def mark(self, request: Request, limits: RequestLimits) -> Marked:
        """Put the request into words and give each of its placeholders its image or video."""
        shield = Shield(self.tokenizer, texts_in([request.prompt, request.messages]))
        text, sources = self._words(request, shield)
        most = limits.max_prompt_tokens * MAX_CHARACTERS_PER_TOKEN
        if len(text) > most:
            raise LimitError(
                f"prompt: {len(text)} characters, at most {most} expected for "
                f"{limits.max_prompt_tokens} tokens. Shorten it or raise RequestLimits.max_prompt_tokens."
            )
        kinds = tuple(self.kind_of[found.group()] for found in self.marker.finditer(text))
        self._check_counts(kinds, sources)
        if len(kinds) > limits.max_items:
            raise LimitError(
                f"prompt: {len(kinds)} images and videos, at most {limits.max_items} expected. "
                "Send fewer or raise RequestLimits.max_items."
            )
        remaining = {kind: iter(each) for kind, each in sources.items()}
        cuts = [0, *(at for found in self.marker.finditer(text) for at in found.span()), len(text)]
        return Marked(
            text=tuple(text[start:stop] for start, stop in zip(cuts[::2], cuts[1::2], strict=True)),
            kinds=kinds,
            sources=tuple(next(remaining[kind]) for kind in kinds),
            is_chat=request.raw_prompt is None,
            hidden=shield.hidden,
        )

    def expand(self, marked: Marked, items: Sequence[PromptItem], limits: RequestLimits) -> Expanded:
        """Ids with one slot for each embedding; refused by count before the text is made."""
        rows = sum(item.num_rows for item in items)
        self._check_length(rows, limits)
        text, ranges = marked.text[0], []
        for item, after in zip(items, marked.text[1:], strict=True):
            start = len(text)
            text += self.expand_item(item)
            ranges.append((start, len(text)))
            text += after
        tokens = self.tokenizer.encode(text, add_special=not marked.is_chat, hidden=marked.hidden)
        if not tokens.ids:
            raise InputError("prompt: a text without any token given, at least one token expected.")
        self._check_length(len(tokens.ids), limits)
        placeholders, column = [], 0
        for item, (start, stop) in zip(items, ranges, strict=True):
            while column < len(tokens.ids) and tokens.spans[column][0] < start:
                column += 1
            first = column
            while column < len(tokens.ids) and tokens.spans[column][0] < stop:
                column += 1
            placeholders.append(self._placeholder(item, first, tokens.ids[first:column]))
        return Expanded(ids=tokens.ids, placeholders=tuple(placeholders))

    def _placeholder(self, item: PromptItem, first: int, ids: Sequence[int]) -> Placeholder:
        is_embed = tuple(each == self.slots[item.kind] for each in ids)
        found = sum(is_embed)
        if found != item.num_rows:
            raise InputError(
                f"{item.kind} {item.number}: its text has room for {found} embeddings, {item.num_rows} "
                "expected. Check that the tokenizer is that of the checkpoint."
            )
        return Placeholder(offset=first, length=len(ids), is_embed=None if all(is_embed) else is_embed)

    def _words(self, request: Request, shield: Shield) -> tuple[str, Mapping[str, Sequence[Source]]]:
        if request.raw_prompt is not None:
            return request.raw_prompt, {kind: request.sources(kind) for kind in KINDS}
        chat = chat_of(request, self.rule, str if request.allow_special_tokens else shield)
        return self.tokenizer.render(chat.messages), chat.sources

    def _check_counts(self, kinds: Sequence[str], sources: Mapping[str, Sequence[Source]]) -> None:
        for kind, given in sources.items():
            room = kinds.count(kind)
            if room != len(given):
                marker = self.rule.markers.get(kind)
                hint = f"Write one {marker} for each." if marker else f"This model takes no {kind}s."
                raise InputError(
                    f"{len(given)} {kind}s given, the prompt has placeholders for {room}. {hint}"
                )

    def _check_length(self, num_tokens: int, limits: RequestLimits) -> None:
        if num_tokens > limits.max_prompt_tokens:
            raise LimitError(
                f"prompt: {num_tokens} tokens, at most {limits.max_prompt_tokens} expected. Send smaller or "
                "fewer media, prune videos, or raise RequestLimits.max_prompt_tokens."
            )
