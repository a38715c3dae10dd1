"""Embeddings side by side by their digests: files of `encode`, shards of a collection, or its index.

T rows, C width
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlexport.codec import Json, Measure, load_strict
from vlexport.errors import InputError, RequestError

SUFFIXES = (".safetensors", ".jsonl")
DIGEST = "rows_sha256"
# What says which items a file has, and not what made them.
_OF_ITEMS = (f".{DIGEST}", ".file")


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemPair:
    """Digests of an item's rows, None where a file lacks it, and how far apart they are (relative L2).

    The error is absent where the digests are equal, or a file has digests alone.
    """

    name: str
    first: str | None
    second: str | None
    error: Measure | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """The digests of a file by item, and what it says of how they were made."""

    path: Path
    digests: Mapping[str, str]
    made_by: Mapping[str, Json]

    @classmethod
    def of(cls, path: Path) -> Features:
        try:
            metadata, records = _read(path)
            digests = {record["item"]: record[DIGEST] for record in records if DIGEST in record}
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise RequestError(
                f"{path}: no embeddings of vlexport ({' '.join(str(error).split())[:200]}). A file of "
                "`encode`, a shard of a collection or its index.jsonl expected."
            ) from error
        digests |= {
            name.removesuffix(f".{DIGEST}"): text
            for name, text in metadata.items()
            if name.endswith(f".{DIGEST}")
        }
        if not digests:
            raise InputError(f"{path}: no digests of rows found. Encode again: this version writes them.")
        made_by = {name: text for name, text in metadata.items() if not name.endswith(_OF_ITEMS)}
        return cls(path=path, digests=digests, made_by=made_by)


def _read(path: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    from safetensors import SafetensorError, safe_open

    if path.suffix == ".jsonl":
        return {}, [load_strict(line) for line in path.read_text(encoding="utf-8").splitlines()]
    try:
        with safe_open(path, framework="np") as file:
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return metadata, json.loads(metadata.pop("items", "[]"))


def pairs_of(first: Features, second: Features) -> Iterator[ItemPair]:
    """Yield every item of either file, in the order of the first."""
    for name in dict.fromkeys([*first.digests, *second.digests]):
        one, other = first.digests.get(name), second.digests.get(name)
        error = None if one == other or None in (one, other) else _error(name, first.path, second.path)
        yield ItemPair(name=name, first=one, second=other, error=error)


def _error(name: str, *paths: Path) -> float | None:
    from safetensors import SafetensorError, safe_open

    if any(path.suffix == ".jsonl" for path in paths):
        return None
    rows = []
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                rows.append(file.get_tensor(f"{name}.embeds").double())
        except SafetensorError as error:
            raise RequestError(
                f"{path}: a digest of {name} without its rows ({error}). Encode it again."
            ) from error
    if rows[0].shape != rows[1].shape:
        return float("inf")
    return float((rows[0] - rows[1]).norm() / rows[1].norm())
