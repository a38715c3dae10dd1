"""Names of tower, connector and language model, by which LoRA and serving systems address modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleMapping:
    """Prefixes of stored names; of several that fit a name, the longest one decides where it belongs."""

    tower: tuple[str, ...]
    connector: tuple[str, ...]
    language_model: tuple[str, ...]


def module_mapping(
    names: Mapping[str, str], connectors: Iterable[str], language_model: tuple[str, ...]
) -> ModuleMapping:
    """Return the parts that a tower's tensors, with their stored names, and its connectors make."""
    by_connector = [
        [stored for name, stored in names.items() if name.startswith(f"{part}.")] for part in connectors
    ]
    connecting = {stored for part in by_connector for stored in part}
    return ModuleMapping(
        tower=shared_prefixes(set(names.values()) - connecting),
        connector=tuple(prefix for part in by_connector for prefix in shared_prefixes(part)),
        language_model=language_model,
    )


def shared_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the longest prefix of whole words that all names share, or the first word of each."""
    modules = [name.split(".")[:-1] for name in names]
    common = [words[0] for words in takewhile(lambda words: len({*words}) == 1, zip(*modules, strict=False))]
    return (".".join([*common, ""]),) if common else tuple(sorted({f"{words[0]}." for words in modules}))
