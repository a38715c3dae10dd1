"""Nested descriptions as rows of a table with two columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def rows_of(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield name and text of each row; names of nested values are joined by dots."""
    if isinstance(value, Mapping):
        plain = {key: each for key, each in value.items() if not _has_parts(each)}
        if plain or not value:
            yield name, ", ".join(f"{key}: {_words(each)}" for key, each in plain.items()) or "none"
        for key, each in value.items():
            if key not in plain:
                yield from rows_of(f"{name}.{key}", each)
    elif isinstance(value, list | tuple) and _has_parts(value):
        for index, each in enumerate(value):
            yield from _part(name, index, each)
    else:
        yield name, _words(value)


def _has_parts(value: object) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return bool(inner) and (isinstance(value, Mapping) or any(isinstance(each, Mapping) for each in inner))


def _part(name: str, index: int, value: object) -> Iterator[tuple[str, str]]:
    """Yield the rows of a list's element, under its own name if it has one."""
    if isinstance(value, Mapping) and "name" in value:
        rest = {key: each for key, each in value.items() if key != "name"}
        yield from rows_of(f"{name}.{value['name']}", rest)
    else:
        yield from rows_of(f"{name}.{index}", value)


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    if value is None or value == {}:
        return "none"
    return str(value)
