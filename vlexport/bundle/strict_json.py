"""JSON without its loose ends: one way to write a value, and no second way to read one.

Refused: duplicate keys, NaN, infinities, integers beyond 63 bits, lone surrogates, deep nesting, large files.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn, TypeAlias

from vlexport.errors import InputError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
JsonObject: TypeAlias = Mapping[str, Json]

MAX_BYTES = 4 << 20
MAX_DEPTH = 24

# Possessive, and a string may lack its end: linear time on hostile text.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def canonical(value: Json) -> bytes:
    """The only spelling of a value: sorted keys, one space of indent, ASCII, a newline at the end."""
    return (json.dumps(_plain(freeze(value)), sort_keys=True, indent=1, allow_nan=False) + "\n").encode(
        "ascii"
    )


def parse(raw: bytes) -> JsonObject:
    """The object in `raw`, frozen; anything that is not strict JSON is an `InputError`."""
    if len(raw) > MAX_BYTES:
        raise InputError(f"{len(raw)} bytes of JSON given; expected at most {MAX_BYTES}.")
    try:
        text = raw.decode("utf-8")
        _check_depth(text)
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except ValueError as error:
        raise InputError(f"expected strict JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, found {_kind(value)}.")
    return {key: freeze(entry, key) for key, entry in value.items()}


def freeze(value: Json, where: str = "value", depth: int = 1) -> Json:
    """A deep copy that cannot be changed; what JSON cannot hold exactly is an `InputError` naming `where`."""
    if depth > MAX_DEPTH:
        raise InputError(f"{where}: nested deeper than {MAX_DEPTH} levels; flatten it.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _sound_text(value, where)
    if isinstance(value, int):
        if abs(value) >= 1 << 63:
            raise InputError(f"{where}: an integer beyond 63 bits given; store it as text.")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{where}: {value} given; expected a finite number.")
        return value
    if isinstance(value, Mapping):
        return MappingProxyType(dict(_frozen_entries(value, where, depth)))
    if isinstance(value, (list, tuple)):
        return tuple(freeze(entry, f"{where}[{at}]", depth + 1) for at, entry in enumerate(value))
    raise InputError(
        f"{where}: {type(value).__name__} given; expected null, a number, text, a list or an object."
    )


def freeze_object(value: JsonObject, where: str) -> JsonObject:
    """`freeze` for an object."""
    return MappingProxyType(dict(_frozen_entries(value, where, 1)))


def _frozen_entries(value: JsonObject, where: str, depth: int) -> Iterator[tuple[str, Json]]:
    for key, entry in value.items():
        yield _sound_text(key, where), freeze(entry, f"{where}.{key[:40]}", depth + 1)


def _sound_text(text: str, where: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"{where}: text with a lone surrogate given; expected valid Unicode.") from error
    return str(text)


def _plain(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"key {twice[:80]!r} is there twice")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:40]} is too large")
    return value


def _check_depth(text: str) -> None:
    # Before json.loads, which recurses once per level.
    depth = 0
    for token in _TOKEN.finditer(text):
        mark = text[token.start()]
        depth += 1 if mark in "[{" else -1 if mark in "]}" else 0
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _kind(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, str):
        return "text"
    if isinstance(value, (int, float)):
        return "a number"
    return "an object" if isinstance(value, Mapping) else "a list"


class Fields:
    """One JSON object that has to hold exactly `keys`, read out by kind; `where` opens every message."""

    def __init__(self, value: Json, where: str, keys: Sequence[str]) -> None:
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: {_kind(value)} found; expected an object.")
        missing, unknown = sorted(set(keys) - set(value)), sorted(set(value) - set(keys))
        if missing or unknown:
            raise InputError(
                f"{where}: missing {', '.join(missing) or 'nothing'}, "
                f"unknown {', '.join(repr(key[:40]) for key in unknown[:8]) or 'nothing'}; "
                f"expected exactly {', '.join(sorted(keys))}."
            )
        self._value = value
        self._where = where

    def text(self, key: str) -> str:
        value = self._value[key]
        return value if isinstance(value, str) else self._refuse(key, "text")

    def optional_text(self, key: str) -> str | None:
        return None if self._value[key] is None else self.text(key)

    def count(self, key: str) -> int:
        value = self._value[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._refuse(key, "a count")
        return value

    def items(self, key: str) -> Sequence[Json]:
        value = self._value[key]
        return value if isinstance(value, tuple) else self._refuse(key, "a list")

    def object(self, key: str) -> JsonObject:
        value = self._value[key]
        return value if isinstance(value, Mapping) else self._refuse(key, "an object")

    def texts(self, key: str) -> dict[str, str]:
        """An object whose values are all text."""
        found = Fields(self.object(key), f"{self._where}.{key}", list(self.object(key)))
        return {name: found.text(name) for name in self.object(key)}

    def _refuse(self, key: str, expected: str) -> NoReturn:
        raise InputError(f"{self._where}.{key}: {_kind(self._value[key])} found; expected {expected}.")
