"""Fields of requests and options held to their declared types, so that nothing else has to expect others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from vlexport.errors import InputError

_WORDS = {
    int: "a whole number", float: "a finite number", bool: "True or False", str: "a text", NoneType: "None"
}  # fmt: skip

# Of messages: tools and their arguments in JSON are ten deep.
MAX_DEPTH, MAX_PARTS = 64, 10**6


def check_fields(record: Any) -> None:
    """Hold every field of a frozen dataclass to its annotation; numbers and tuples become Python's own."""
    for name, hint in _hints(record.__class__).items():
        value = checked(name, getattr(record, name), hint)
        object.__setattr__(record, name, value)


def checked(name: str, value: object, hint: Any) -> Any:
    """Return the value as one of the hint's type; refuse it by name otherwise."""
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        fits, found = _as(name, value, kind)
        if fits:
            return found
    raise refusal(name, value, hint)


def refusal(name: str, value: object, hint: Any) -> InputError:
    """Return the error that names the field, what was given and what was expected."""
    kind = type(value).__name__
    given = f"{value!a:.80} ({kind})" if isinstance(value, str | bytes | Real) else kind
    return InputError(f"{name}: {given} given, {_spelled(hint)} expected.")


def check_text(name: str, text: str) -> None:
    """Refuse halves of surrogate pairs, which are no characters and which no tokenizer takes."""
    # Media in `data:` URLs are long, and ASCII.
    for place, sign in enumerate("" if text.isascii() else text):
        if "\ud800" <= sign <= "\udfff":
            raise InputError(
                f"{name}: a lone surrogate ({sign!a}) at character {place} given, Unicode text expected. "
                "On a command line it means a byte that is not UTF-8."
            )


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in nested lists and objects, names of entries too; refuse what has no end."""
    left, num_seen = [(value, 0)], 0
    while left:
        each, depth = left.pop()
        num_seen += 1
        if depth > MAX_DEPTH or num_seen > MAX_PARTS:
            raise InputError(
                f"messages: lists and objects nested more than {MAX_DEPTH} deep, or more than {MAX_PARTS} "
                "parts given. One of them may contain itself."
            )
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += [(part, depth + 1) for entry in reversed([*each.items()]) for part in entry[::-1]]
        elif isinstance(each, list | tuple):
            left += [(part, depth + 1) for part in reversed(each)]


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _as(name: str, value: object, kind: Any) -> tuple[bool, Any]:
    """Return whether the value is of a kind, and the value as that kind."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return True, value
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            return False, None
        return True, int(value)
    if kind is float:
        if not is_number(value):
            return False, None
        return True, value if isinstance(value, int) else float(value)
    if origin is Literal:
        return isinstance(value, str) and value in inner, value
    if origin in (tuple, Sequence):
        fits = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
        if not fits:
            return False, None
        items = [checked(f"{name}[{place}]", each, inner[0]) for place, each in enumerate(value)]  # type: ignore[arg-type, var-annotated]
        return True, tuple(items)
    fits = isinstance(value, origin or kind)
    if fits and isinstance(value, str):
        check_text(name, value)
    return fits, value


def unreadable(tensor: Any) -> str | None:
    """Return why the values of a tensor are not all there, one after the other; None where they are."""
    layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    if layout != "strided":
        return f"a {layout} tensor"
    if tensor.device.type == "meta":
        return "a tensor without values (device 'meta')"
    return "a quantised tensor" if tensor.is_quantized else None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite real number."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def _spelled(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_spelled(each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (tuple, Sequence):
        return "a list"
    name = _WORDS.get(hint) or str(getattr(get_origin(hint) or hint, "__name__", hint))
    return name if hint in _WORDS else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
