"""From a request to token ids with room for the embeddings of its media."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from vlexport.codec import texts_in
from vlexport.errors import InputError, LimitError, MediaError
from vlexport.media.sources import URL
from vlexport.positions.splice import Placeholder
from vlexport.recipe import PromptItem, PromptRule
from vlexport.runtime.request import KINDS, MarkedPrompt, Request, RequestLimits, Source, TokenizedPrompt
from vlexport.runtime.tokenizer import CheckpointTokenizer, Shield

Media = dict[str, list[Source]]

# No tokenizer needs this many characters for a token on average.
MAX_CHARACTERS_PER_TOKEN = 64
# Texts beyond so many characters are counted in pieces of this length before anything else is done with them.
# A cut adds a few tokens.
PIECE_CHARACTERS, TOKENS_OF_A_CUT = 2**17, 16
# Roles, contents and names of entries are texts; fewer than tokens, but in the shortest prompts.
LEAST_TEXTS = 1000
URL_HINT = "vlexport opens no network connections; download it first and pass the file."


class Prompter:
    """Prompts by the rule of one family: first their text with markers, then ids with room for media."""

    def __init__(
        self, tokenizer: CheckpointTokenizer, rule: PromptRule[Any], expand: Callable[[PromptItem], str]
    ) -> None:
        self.tokenizer = tokenizer
        self.rule = rule
        self.expand_item = expand
        self.slots = {kind: tokenizer.id_of(token) for kind, token in rule.slots.items()}
        self.kind_of = {marker: kind for kind, marker in rule.markers.items()}
        self.marker = re.compile("|".join(f"({re.escape(marker)})" for marker in self.kind_of))

    def mark(self, request: Request, limits: RequestLimits) -> MarkedPrompt:
        shield = Shield(self.tokenizer, texts_in([request.prompt, request.messages]))
        bound = TextBound(self.tokenizer, limits)
        if request.raw_prompt is not None:
            text = bound(request.raw_prompt)
            media = {kind: list(request.sources(kind)) for kind in KINDS}
        else:
            kept = str if request.allow_special_tokens else shield
            messages, media = chat_of(request, self.rule, lambda text: kept(bound(text)))
            text = self.tokenizer.render(messages)
            TextBound(self.tokenizer, limits)(text)
        kinds = tuple(self.kind_of[match.group()] for match in self.marker.finditer(text))
        self._check_counts(kinds, media)
        if len(kinds) > limits.max_items:
            raise LimitError(
                f"prompt: {len(kinds)} images and videos, at most {limits.max_items} expected. "
                "Send fewer or raise RequestLimits.max_items."
            )
        remaining = {kind: iter(sources) for kind, sources in media.items()}
        cuts = [0, *(at for match in self.marker.finditer(text) for at in match.span()), len(text)]
        return MarkedPrompt(
            text=tuple(text[start:stop] for start, stop in zip(cuts[::2], cuts[1::2], strict=True)),
            kinds=kinds,
            sources=tuple(next(remaining[kind]) for kind in kinds),
            is_chat=request.raw_prompt is None,
            hidden=shield.hidden,
        )

    def expand(
        self, marked: MarkedPrompt, items: Sequence[PromptItem], limits: RequestLimits
    ) -> TokenizedPrompt:
        """Return ids with one slot for each embedding; too many are refused before the text is made."""
        _check_length(sum(item.num_rows for item in items), limits)
        text, ranges = marked.text[0], []
        expanded = [self.expand_item(item) for item in items]
        written = [self.rule.markers[item.kind] for item in items] if self.rule.apart else expanded
        for own, after in zip(written, marked.text[1:], strict=True):
            ranges.append((len(text), len(text) + len(own)))
            text += own + after
        tokens = self.tokenizer.encode(text, add_special=not marked.is_chat, hidden=marked.hidden)
        if not tokens.ids:
            raise InputError("prompt: a text without any token given, at least one token expected.")
        placeholders, ids, column = [], list[int](), 0
        for item, own, (start, stop) in zip(items, expanded, ranges, strict=True):
            while column < len(tokens.ids) and tokens.spans[column][0] < start:
                ids.append(tokens.ids[column])
                column += 1
            first = column
            while column < len(tokens.ids) and tokens.spans[column][0] < stop:
                column += 1
            own_ids = tokens.ids[first:column]
            if self.rule.apart:
                own_ids = self.tokenizer.encode(own, add_special=False).ids
            placeholders.append(self._placeholder(item, len(ids), own_ids))
            ids += own_ids
        ids += tokens.ids[column:]
        _check_length(len(ids), limits)
        return TokenizedPrompt(ids=tuple(ids), placeholders=tuple(placeholders))

    def _placeholder(self, item: PromptItem, first: int, ids: Sequence[int]) -> Placeholder:
        is_embed = tuple(token == self.slots[item.kind] for token in ids)
        room = sum(is_embed)
        if room != item.num_rows:
            raise InputError(
                f"{item.kind} {item.number}: its text has room for {room} embeddings, {item.num_rows} "
                "expected. Check that the tokenizer is that of the checkpoint."
            )
        return Placeholder(offset=first, length=len(ids), is_embed=None if all(is_embed) else is_embed)

    def _check_counts(self, kinds: Sequence[str], media: Media) -> None:
        for kind, sources in media.items():
            room = kinds.count(kind)
            if room != len(sources):
                marker = self.rule.markers.get(kind)
                hint = f"Write one {marker} for each." if marker else f"This model takes no {kind}s."
                raise InputError(
                    f"{len(sources)} {kind}s given, the prompt has placeholders for {room}. {hint}"
                )


def question_ids(tokenizer: CheckpointTokenizer, request: Request) -> list[int]:
    """Return the ids of what a request asks: its prompt, or the texts of its last message."""
    text = request.prompt if request.raw_prompt is None else request.raw_prompt
    if request.messages:
        parts = _parts(request.messages[-1], len(request.messages) - 1)
        text = "\n".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part)
    return tokenizer.words(text or "")


class TextBound:
    """Passes texts on until together they have more tokens than a prompt may; counts long ones in pieces.

    Tokens are counted before a text is searched for special ones, which takes several times as long.
    """

    def __init__(self, tokenizer: CheckpointTokenizer, limits: RequestLimits) -> None:
        self.tokenizer, self.most = tokenizer, limits.max_prompt_tokens
        self.num_texts = self.num_characters = self.num_tokens = 0

    def __call__(self, text: str) -> str:
        self.num_texts += 1
        self.num_characters += len(text)
        most = self.most * MAX_CHARACTERS_PER_TOKEN
        if self.num_characters > most:
            raise self._too_long(f"{self.num_characters} characters, at most {most}")
        if self.num_texts > max(self.most, LEAST_TEXTS):
            raise self._too_long(f"{self.num_texts} texts, at most {max(self.most, LEAST_TEXTS)}")
        if self.num_characters > PIECE_CHARACTERS:
            for start in range(0, len(text), PIECE_CHARACTERS):
                counted = self.tokenizer.encode(text[start : start + PIECE_CHARACTERS], add_special=False)
                self.num_tokens += max(0, len(counted.ids) - TOKENS_OF_A_CUT)
                if self.num_tokens > self.most:
                    raise self._too_long(f"{self.num_tokens} tokens and more, at most {self.most}")
        return text

    def _too_long(self, count: str) -> LimitError:
        return LimitError(
            f"prompt: {count} expected for {self.most} tokens. Shorten it or raise "
            "RequestLimits.max_prompt_tokens."
        )


def _check_length(num_tokens: int, limits: RequestLimits) -> None:
    if num_tokens > limits.max_prompt_tokens:
        raise LimitError(
            f"prompt: {num_tokens} tokens, at most {limits.max_prompt_tokens} expected. Send smaller or "
            "fewer media, prune videos, or raise RequestLimits.max_prompt_tokens."
        )


def chat_of(
    request: Request, rule: PromptRule[Any], shield: Callable[[str], str] = lambda text: text
) -> tuple[list[dict[str, object]], Media]:
    """Return chat messages, texts through `shield`, and media; parts without data take the next given."""
    messages = request.messages
    if messages is None:
        slots = [{"type": kind} for kind in KINDS for _ in request.sources(kind)]
        messages = [{"role": "user", "content": [*slots, {"type": "text", "text": request.prompt}]}]
    remaining = {kind: list(request.sources(kind)) for kind in KINDS}
    media: Media = {kind: [] for kind in KINDS}
    plain = []
    for number, message in enumerate(messages):
        parts = []
        for given_part in _parts(message, number):
            part = _part(given_part, rule, number)
            if part["type"] == "text":
                part["text"] = shield(cast("str", part["text"]))
            else:
                media[part["type"]].append(_source(part, remaining[part["type"]], number))
                part = {"type": part["type"]}
            parts.append(part)
        content: object = parts
        if isinstance(message["content"], str):
            content = parts[0]["text"]
        elif rule.content == "text":
            content = "\n".join(
                part["text"] if "text" in part else rule.markers[part["type"]] for part in parts
            )
        rest = {name: value for name, value in message.items() if name != "content"}
        plain.append({**_shielded(rest, shield), "content": content})
    for kind, left in remaining.items():
        if left:
            raise InputError(
                f"{len(media[kind]) + len(left)} {kind}s given, the messages have parts for "
                f"{len(media[kind])}. Add a part for each, or leave them out."
            )
    return plain, media


def _shielded(value: Any, shield: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, Mapping):
        return {_shielded(name, shield): _shielded(item, shield) for name, item in value.items()}
    return [_shielded(item, shield) for item in value] if isinstance(value, list | tuple) else value


def _parts(message: object, number: int) -> Sequence[object]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(
            f"message {number}: {type(message).__name__} without a role given, an object with 'role' and "
            "'content' expected."
        )
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise InputError(
            f"message {number}: content of {type(content).__name__} given, a text or a list of parts "
            "expected."
        )
    return content


def _part(part: object, rule: PromptRule[Any], number: int) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise InputError(
            f"message {number}: a part of {type(part).__name__} given, an object with 'type' expected."
        )
    if not isinstance(part.get("type"), str):
        raise InputError(
            f"message {number}: a part without a type given ({', '.join(map(str, part)) or 'empty'}); "
            'expected one such as {"type": "text", "text": ...} or {"type": "image", "image": ...}.'
        )
    # `image_url` is OpenAI's form; transformers has the data under the kind, `url` or `path`.
    kind = str(part.get("type")).removesuffix("_url")
    is_text = kind == "text"
    if is_text and not isinstance(part.get("text"), str):
        raise InputError(
            f"message {number}: a part of type 'text' has {type(part.get('text')).__name__} under 'text', a "
            "text expected."
        )
    named = [part.get(name) for name in (kind, f"{kind}_url", "url", "path")]
    data = next((source for source in named if source is not None), None)
    data = data.get("url") if isinstance(data, Mapping) else data
    if not is_text and isinstance(data, str) and URL.match(data) and not data.startswith("data:"):
        raise MediaError(f"message {number}: a URL given as media, a local file expected. {URL_HINT}")
    if not is_text and kind not in rule.markers:
        kinds = ", ".join(sorted(["text", *rule.markers]))
        raise InputError(
            f"message {number}: a part of type '{kind}' given, this model takes {kinds}, each with its data "
            "under that name."
        )
    return {"type": kind, kind: data}


def _source(part: Mapping[str, Any], remaining: list[Source], number: int) -> Source:
    kind = part["type"]
    if part[kind] is not None:
        return cast("Source", part[kind])
    if not remaining:
        raise InputError(
            f"message {number}: its part of type '{kind}' has no data, and no further {kind} is given. "
            f"Put it under '{kind}', or pass it with the messages."
        )
    return remaining.pop(0)
