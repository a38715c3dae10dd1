"""Chats in, and which of their parts are media."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vlexport.errors import InputError, MediaError
from vlexport.language import PromptRule
from vlexport.runtime.requests import KINDS, Message, Request

if TYPE_CHECKING:
    from vlexport.runtime.requests import Source

URL_HINT = "vlexport opens no network connections; download it first and pass the file."


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Messages without media data, ready for a template, and the media by kind in their order."""

    messages: tuple[Mapping[str, object], ...]
    sources: Mapping[str, tuple[Source, ...]]


class _Pool(NamedTuple):
    """Media given beside the messages and not yet taken, and all that were found, by kind."""

    given: dict[str, list[Source]]
    found: dict[str, list[Source]]


def chat_of(
    request: Request, rule: PromptRule[Any], shield: Callable[[str], str] = lambda text: text
) -> Chat:
    """The request's messages; parts without data take the next of the media given beside them.

    Every text of the messages passes through `shield`.
    """
    messages = request.messages if request.messages is not None else (_question(request),)
    given = {kind: list(request.sources(kind)) for kind in KINDS}
    found: dict[str, list[Source]] = {kind: [] for kind in KINDS}
    plain = []
    for number, message in enumerate(messages):
        parts = [_part(part, _Pool(given, found), rule, number) for part in _parts(message, number)]
        words = {name: value for name, value in message.items() if name != "content"}
        parts = [part | {"text": shield(part["text"])} if "text" in part else part for part in parts]
        plain.append({**_shielded(words, shield), "content": _content(message, parts, rule)})
    for kind, rest in given.items():
        if rest:
            raise InputError(
                f"{len(found[kind]) + len(rest)} {kind}s given, the messages have parts for "
                f"{len(found[kind])}. Add a part for each, or leave them out."
            )
    return Chat(messages=tuple(plain), sources={kind: tuple(each) for kind, each in found.items()})


def _shielded(value: Any, shield: Callable[[str], str]) -> Any:
    """Nested lists and objects with every text shielded."""
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, Mapping):
        return {_shielded(name, shield): _shielded(each, shield) for name, each in value.items()}
    return [_shielded(each, shield) for each in value] if isinstance(value, list | tuple) else value


def _question(request: Request) -> Message:
    media = [{"type": kind} for kind in KINDS for _ in request.sources(kind)]
    return {"role": "user", "content": [*media, {"type": "text", "text": request.prompt}]}


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


def _part(part: object, pool: _Pool, rule: PromptRule[Any], number: int) -> dict[str, str]:
    """A text part as it is, a media part without its data, which is put with what was found."""
    if not isinstance(part, Mapping):
        raise InputError(
            f"message {number}: a part of {type(part).__name__} given, an object with 'type' expected."
        )
    kind = str(part.get("type"))
    if kind in ("image_url", "video_url") or "url" in part:
        raise MediaError(f"message {number}: a URL given as media, a local file expected. {URL_HINT}")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in rule.markers:
        known = ", ".join(sorted(["text", *rule.markers]))
        raise InputError(
            f"message {number}: a part of type '{kind}' given, this model takes {known}, each with its data "
            "under that name."
        )
    if part.get(kind) is not None:
        pool.found[kind].append(cast("Source", part[kind]))
    elif pool.given[kind]:
        pool.found[kind].append(pool.given[kind].pop(0))
    else:
        raise InputError(
            f"message {number}: its part of type '{kind}' has no data, and no further {kind} is given. "
            f"Put it under '{kind}', or pass it beside the messages."
        )
    return {"type": kind}


def _content(message: Message, parts: Sequence[dict[str, str]], rule: PromptRule[Any]) -> object:
    if isinstance(message.get("content"), str):
        return parts[0]["text"]
    if rule.content == "parts":
        return list(parts)
    return "\n".join(part["text"] if "text" in part else rule.markers[part["type"]] for part in parts)
