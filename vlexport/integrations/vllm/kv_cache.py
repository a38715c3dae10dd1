"""Key-value caches of attention layers: order by layer index, binding, and sharing between layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vlexport.errors import InputError


class CachedLayer(Protocol):
    """An attention layer whose keys and values lie in a tensor that the caller owns."""

    def bind(self, cache: Tensor) -> None:
        """Use `cache` from now on."""
        ...


def layer_index(name: str, *, modules_per_layer: int = 1) -> int:
    """Return the index of a layer from its dotted name, `layers.3.attn` is 3.

    With several attention modules per layer the name holds layer and module: `layers.3.attn.1` of 2 is 7.
    """
    numbers = [int(part) for part in name.split(".") if part.isascii() and part.isdigit()]
    expected = 1 if modules_per_layer == 1 else 2
    if len(numbers) != expected:
        raise InputError(
            f"layer name '{name}' holds {len(numbers)} numbers between its dots, {expected} expected: "
            f"{'the layer' if expected == 1 else f'the layer and which of its {modules_per_layer} modules'}."
        )
    if modules_per_layer == 1:
        return numbers[0]
    layer, module = numbers
    if module >= modules_per_layer:
        raise InputError(
            f"layer name '{name}': module {module} given, a layer has {modules_per_layer} (0 to "
            f"{modules_per_layer - 1})."
        )
    return layer * modules_per_layer + module


def bind_order(
    names: Sequence[str], *, modules_per_layer: int = 1, may_share_index: bool = False
) -> list[str]:
    """Return layer names by ascending index; names of one index, where that is allowed, keep their order."""
    by_index: dict[int, list[str]] = {}
    for name in names:
        by_index.setdefault(layer_index(name, modules_per_layer=modules_per_layer), []).append(name)
    for index, group in sorted(by_index.items()):
        if len(group) > 1 and not may_share_index:
            raise InputError(
                f"layers {', '.join(group)} all have index {index}; expected one layer per index. "
                f"Say how many modules a layer has, or allow a shared index where the platform does."
            )
    return [name for _, group in sorted(by_index.items()) for name in group]


def bind_caches(
    caches: Mapping[str, Tensor],
    layers: Mapping[str, CachedLayer],
    *,
    modules_per_layer: int = 1,
    may_share_index: bool = False,
) -> list[Tensor]:
    """Give every layer its own cache and return the caches in bind order."""
    order = bind_order(list(caches), modules_per_layer=modules_per_layer, may_share_index=may_share_index)
    unknown = sorted(set(caches) - set(layers))
    if unknown:
        raise InputError(
            f"no layer for the caches {', '.join(unknown)}; "
            f"layers given: {', '.join(sorted(layers)) or 'none'}."
        )
    for name, cache in caches.items():
        layers[name].bind(cache)
    return [caches[name] for name in order]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedGroups:
    """Cache groups with the sharing layers added, and the layers that only use another one's cache."""

    groups: tuple[tuple[str, ...], ...]
    borrowers: frozenset[str]


def share_groups(groups: Sequence[Sequence[str]], targets: Mapping[str, str]) -> SharedGroups:
    """Put each layer of `targets` into the group of the layer whose cache it uses.

    Only a layer that owns a cache can be used; one that borrows itself cannot.
    """
    group_of = {name: index for index, group in enumerate(groups) for name in group}
    joined = [list(group) for group in groups]
    for name, target in targets.items():
        if name in group_of:
            raise InputError(f"layer '{name}' has a cache of its own and cannot use the one of '{target}'.")
        if target not in group_of:
            raise InputError(
                f"layer '{name}' wants the cache of '{target}', which owns none; "
                f"layers that own one: {', '.join(sorted(group_of)) or 'none'}."
            )
        joined[group_of[target]].append(name)
    return SharedGroups(groups=tuple(map(tuple, joined)), borrowers=frozenset(targets))
