"""Queries, keys and values that a checkpoint stores apart, read as the one tensor that towers have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from vlexport.checkpoint.safetensors import StoredTensor, Weights
from vlexport.errors import CheckpointError

if TYPE_CHECKING:
    import torch

WHOLE = "qkv"
# `attn.q.weight` beside `attn.k.weight`, or `attn.q_proj.weight`, where `attn.qkv.weight` is wanted.
FORMS = ("{}", "{}_proj")


class JoinedWeights:
    """The weights of a checkpoint, where queries, keys and values answer to the name of the whole too."""

    def __init__(self, base: Weights) -> None:
        self.base = base

    def names(self) -> tuple[str, ...]:
        return self.base.names()

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names())

    def files(self) -> tuple[str, ...]:
        return self.base.files()

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the stored tensors that make a tensor: itself, or queries, keys and values in this order."""
        known = self._known
        before, _, after = name.rpartition(WHOLE)
        if name in known or not before:
            return (name,)
        for form in FORMS:
            apart = tuple(before + form.format(part) + after for part in WHOLE)
            if all(part in known for part in apart):
                return apart
        return (name,)

    def stored(self, name: str) -> StoredTensor:
        """Return dtype and shape of one tensor, without reading it; a joined one has no bytes of its own."""
        found = [self.base.stored(part) for part in self.parts(name)]
        first = found[0]
        if len(found) == 1:
            return first
        kinds = {(each.dtype, each.shape[1:]) for each in found}
        if len(kinds) > 1 or not first.shape:
            given = ", ".join(f"{each.dtype} {list(each.shape)}" for each in found)
            raise CheckpointError(
                f"queries, keys and values of '{name}' are {given}; expected one dtype and width. Save the "
                "checkpoint again."
            )
        shape = (sum(each.shape[0] for each in found), *first.shape[1:])
        num_bytes = sum(each.num_bytes for each in found)
        return StoredTensor(
            name=name, dtype=first.dtype, shape=shape, file=first.file, start=first.start, num_bytes=num_bytes
        )

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield wanted names with their tensors, joined ones after the others."""
        import torch

        plain, apart = self._split(names)
        yield from self.base.read(plain, dtype)
        for wanted, parts in apart.items():
            found = dict(self.base.read({part: part for part in parts}, dtype))
            yield wanted, torch.cat([found[part] for part in parts])

    def describe(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return what a digest has to cover: of a joined tensor its parts, in their order."""
        plain, apart = self._split(names)
        found = self.base.describe(plain)
        for wanted, parts in apart.items():
            each = self.base.describe({f"{wanted} {place}": part for place, part in enumerate(parts)})
            found[wanted] = " ".join(each[name] for name in sorted(each))
        return found

    def _split(self, names: Mapping[str, str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
        """Return what is read as it is stored, and the parts of what is joined."""
        parts = {wanted: self.parts(name) for wanted, name in names.items()}
        plain = {wanted: each[0] for wanted, each in parts.items() if len(each) == 1}
        return plain, {wanted: each for wanted, each in parts.items() if len(each) > 1}
