"""Mixtures of experts: checkpoints store each expert by itself, transformers holds those of a layer together.

E experts, I inner width, D width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
# The parts of each joined tensor: gate and up lie one above the other.
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
SINGLE = re.compile(r"(?P<stem>.*\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")


def stored_apart(shapes: Shapes, is_stored: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes with joined experts replaced by single ones, where these are stored."""
    names, apart = set(is_stored), {}
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        parts = PARTS.get(last, ()) if f"{stem}.0.down_proj.weight" in names else ()
        if not parts:
            apart[name] = shape
        for expert in range(shape[0] if parts else 0):
            single = (shape[1] // len(parts), shape[2])
            apart |= dict.fromkeys((f"{stem}.{expert}.{part}.weight" for part in parts), single)
    return apart


def joined(weights: Iterable[tuple[str, Tensor]], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with experts that were stored apart in their place among the others of the layer."""
    whole_EID: dict[str, Tensor] = {}
    for name, tensor in weights:
        match = None if name in shapes else SINGLE.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        last, parts = next(
            (last, parts)
            for last, parts in PARTS.items()
            if match["part"] in parts and f"{match['stem']}.{last}" in shapes
        )
        into = f"{match['stem']}.{last}"
        if into not in whole_EID:
            whole_EID[into] = tensor.new_empty(shapes[into])
        rows = whole_EID[into][int(match["expert"])].chunk(len(parts))[parts.index(match["part"])]
        rows.copy_(tensor)
    yield from whole_EID.items()
