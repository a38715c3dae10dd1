"""Values of declared types: fields that are checked, and frozen dataclasses to and from strict JSON.

Refused: duplicate keys, NaN, infinities, integers beyond 63 bits, lone surrogates, deep nesting, large files,
unknown and missing fields, values of another type. There is one way to write a value.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeAlias,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from vlexport.errors import InputError, VlexportError, error_record

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
JsonObject: TypeAlias = Mapping[str, Json]
# A result of a measurement: what JSON lacks is written as text.
Measure: TypeAlias = Annotated[float, "or nan, inf, -inf"]

T = TypeVar("T")

MAX_BYTES = 4 << 20
MAX_DEPTH = 24

# Of messages: tools and their arguments in JSON are ten deep.
MAX_NESTED, MAX_PARTS = 64, 10**6

# Possessive, and a string may lack its end: linear time on hostile text.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def encode(value: object) -> Any:
    """Return a dataclass, or values that hold some, as plain JSON values."""
    # Of a class that is one value in JSON; its `from_json_value` reads it.
    json_value = getattr(value, "json_value", None)
    if json_value is not None:
        return json_value()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, VlexportError):
        return error_record(value)
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {encode(name): encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], value: object, where: str = "") -> T:
    """Return the value of a type that `encode` wrote; an `InputError` names the field that differs."""
    return cast("T", _decode(kind, value, where))


def _decode(kind: Any, value: object, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    read = _READERS.get(kind) or getattr(kind, "from_json_value", None)
    if read is not None:
        return _named(where, lambda: read(value, where))
    if origin in (Union, UnionType):
        return _one_of(kind, value, where)
    if is_dataclass(kind):
        return _record(kind, value, where)
    if origin in (Mapping, dict):
        if not isinstance(value, Mapping):
            raise refusal(where, value, kind)
        key, entry = inner
        return {
            _decode(key, name, where): _decode(entry, item, f"{where}.{name:.40}")
            for name, item in value.items()
        }
    if origin is tuple:
        items: Sequence[object] = checked(where, value, Sequence[object])
        kinds = inner[:1] * len(items) if inner[-1] is Ellipsis else inner
        if len(items) != len(kinds):
            raise InputError(f"{where}: {len(items)} entries given, {len(kinds)} expected.")
        return tuple(
            _decode(item_kind, item, f"{where}[{at}]")
            for at, (item_kind, item) in enumerate(zip(kinds, items, strict=True))
        )
    return checked(where, value, kind)


def _one_of(kind: Any, value: object, where: str) -> Any:
    kinds = [option for option in get_args(kind) if option is not NoneType]
    if value is None and len(kinds) < len(get_args(kind)):
        return None
    if len(kinds) == 1:
        return _decode(kinds[0], value, where)
    for option in kinds:
        try:
            return _decode(option, value, where)
        except InputError:
            continue
    raise refusal(where, value, kind)


def _record(kind: Any, value: object, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(value, Mapping):
        raise refusal(where, value, kind)
    missing, unknown = sorted(hints.keys() - value.keys()), sorted(value.keys() - hints.keys())
    if missing or unknown:
        raise InputError(
            f"{where or 'top level'}: missing {', '.join(missing) or 'nothing'}, "
            f"unknown {', '.join(repr(key[:40]) for key in unknown[:8]) or 'nothing'}; "
            f"expected exactly {', '.join(sorted(hints))}."
        )
    inside = f"{where}." if where else ""
    values = {name: _decode(hint, value[name], f"{inside}{name}") for name, hint in hints.items()}
    return _named(where, lambda: kind(**values))


def _named(where: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except InputError as error:
        if str(error).startswith(where):
            raise
        raise InputError(f"{where}: {error}") from error


# `Json` holds itself: any value is allowed in such a field.
_FREE = {"Json": object, "Mapping": Mapping, "Sequence": Sequence}


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, localns=_FREE, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _measure(value: object, where: str) -> float:
    return float(value if value in ("nan", "inf", "-inf") else checked(where, value, float))


def _error(value: object, where: str) -> VlexportError:
    content: Mapping[str, object] = checked(where, value, Mapping)
    return VlexportError(checked(f"{where}.message", content.get("message"), str))


_READERS: Mapping[Any, Callable[[object, str], Any]] = {Measure: _measure, VlexportError: _error}


def canonical(value: Json) -> bytes:
    """Return the only spelling of a value: sorted keys, one space of indent, ASCII, a newline at the end."""
    text = json.dumps(encode(freeze(value)), sort_keys=True, indent=1, allow_nan=False)
    return (text + "\n").encode("ascii")


def parse(raw: bytes) -> JsonObject:
    """Return the object in `raw`, frozen; anything that is not strict JSON is an `InputError`."""
    if len(raw) > MAX_BYTES:
        raise InputError(f"{len(raw)} bytes of JSON given; expected at most {MAX_BYTES}.")
    try:
        text = raw.decode("utf-8")
        _check_depth(text)
        value = load_strict(text, parse_float=_finite)
    except ValueError as error:
        raise InputError(f"expected strict JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, found a {type(value).__name__}.")
    return {key: freeze(entry, key) for key, entry in value.items()}


def refuse_constant(word: str) -> NoReturn:
    """Refuse NaN and infinity."""
    raise ValueError(f"{word} is not a JSON number")


def load_strict(
    text: str,
    parse_float: Callable[[str], float] = float,
    parse_constant: Callable[[str], object] = refuse_constant,
) -> Any:
    """Return the value of a JSON text; duplicate keys and, by default, NaN are a `ValueError`."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant, parse_float=parse_float)


def freeze(value: Json, where: str = "value", depth: int = 1) -> Json:
    """Return a deep copy that cannot be changed; refuse what JSON cannot hold exactly, naming `where`."""
    if depth > MAX_DEPTH:
        raise InputError(f"{where}: nested deeper than {MAX_DEPTH} levels; flatten it.")
    if isinstance(value, Mapping):
        return MappingProxyType(
            {
                str(_sound(key, where)): freeze(entry, f"{where}.{key[:40]}", depth + 1)
                for key, entry in value.items()
            }
        )
    if isinstance(value, (list, tuple)):
        return tuple(freeze(entry, f"{where}[{at}]", depth + 1) for at, entry in enumerate(value))
    return _sound(value, where)


def freeze_object(value: JsonObject, where: str) -> JsonObject:
    """Return a deep copy of an object that cannot be changed."""
    return cast("JsonObject", freeze(value, where))


def _sound(value: Json, where: str) -> Json:
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{where}: text with a lone surrogate given; expected valid Unicode."
                ) from error
        return str(value)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise InputError(f"{where}: an integer beyond 63 bits given; store it as text.")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where}: {value} given; expected a finite number.")
    if value is not None and not isinstance(value, bool | int | float):
        raise InputError(
            f"{where}: {type(value).__name__} given; expected null, a number, text, a list or an object."
        )
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"duplicate key {twice[:80]!r}")
    return content


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


_SPELLINGS = {
    int: "a whole number", float: "a finite number", bool: "True or False", str: "a text", NoneType: "None"
}  # fmt: skip


def check_fields(record: Any) -> None:
    """Check every field of a frozen dataclass by its annotation; numbers and tuples become Python's own."""
    for name, hint in _hints(record.__class__).items():
        value = checked(name, getattr(record, name), hint)
        object.__setattr__(record, name, value)


def checked(name: str, value: object, hint: Any) -> Any:
    """Return the value as one of the hint's type; refuse it by name otherwise."""
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        fits, converted = _as(name, value, kind)
        if fits:
            return converted
    raise refusal(name, value, hint)


def refusal(name: str, value: object, hint: Any) -> InputError:
    """Return the error that names the field, what was given and what was expected."""
    kind = type(value).__name__
    actual = f"{value!a:.80} ({kind})" if isinstance(value, str | bytes | Real) else kind
    return InputError(f"{name}: {actual} given, {_spelled(hint)} expected.")


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
        node, depth = left.pop()
        num_seen += 1
        if depth > MAX_NESTED or num_seen > MAX_PARTS:
            raise InputError(
                f"messages: lists and objects nested more than {MAX_NESTED} deep, or more than {MAX_PARTS} "
                "parts given. One of them may contain itself."
            )
        if isinstance(node, str):
            yield node
        elif isinstance(node, Mapping):
            left += [(part, depth + 1) for entry in reversed([*node.items()]) for part in entry[::-1]]
        elif isinstance(node, list | tuple):
            left += [(part, depth + 1) for part in reversed(node)]


def _as(name: str, value: object, kind: Any) -> tuple[bool, Any]:
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
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
            return False, None
        items = [checked(f"{name}[{place}]", item, inner[0]) for place, item in enumerate(value)]
        return True, tuple(items)
    fits = isinstance(value, origin or kind)
    if fits and isinstance(value, str):
        check_text(name, value)
    return fits, value


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite real number."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def _spelled(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_spelled(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (tuple, Sequence):
        return "a list"
    name = _SPELLINGS.get(hint) or str(getattr(get_origin(hint) or hint, "__name__", hint))
    return name if hint in _SPELLINGS else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
