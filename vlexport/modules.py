"""Parts of a checkpoint: which names belong to tower, connector and language model.

LoRA, quantisation and serving systems address modules by such prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlexport.checkpoint import Checkpoint
    from vlexport.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleMapping:
    """Prefixes of stored names; of several that fit a name, the longest one decides where it belongs."""

    tower: tuple[str, ...]
    connector: tuple[str, ...]
    language_model: tuple[str, ...]


def module_mapping(recipe: Recipe[Any], checkpoint: Checkpoint) -> ModuleMapping:
    """Return the parts of a checkpoint, from its headers alone."""
    config = recipe.read_config(checkpoint)
    connectors = recipe.outline(config).connectors
    stored = recipe.weight_names(checkpoint, config)
    by_connector = [
        [where for name, where in stored.items() if name.startswith(f"{part}.")] for part in connectors
    ]
    connecting = {name for names in by_connector for name in names}
    return ModuleMapping(
        tower=shared_prefixes(set(stored.values()) - connecting),
        connector=tuple(prefix for names in by_connector for prefix in shared_prefixes(names)),
        language_model=_language_model(recipe, checkpoint.tensor_names()),
    )


def _language_model(recipe: Recipe[Any], names: Iterable[str]) -> tuple[str, ...]:
    rule, stored = recipe.language, {*names}
    if rule is None:
        return ()
    bodies = [prefix for prefix in rule.prefixes if prefix + rule.table in stored]
    heads = [f"{head.rpartition('.')[0]}." for head in rule.heads if head in stored]
    return (*bodies[:1], *heads[:1])


def shared_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the longest prefix of whole words that all names share, or the first word of each."""
    modules = [name.split(".")[:-1] for name in names]
    common = [words[0] for words in takewhile(lambda words: len({*words}) == 1, zip(*modules, strict=False))]
    return (".".join([*common, ""]),) if common else tuple(sorted({f"{words[0]}." for words in modules}))
