"""Keys and values of every layer in memory that is taken once.

K key/value heads, S places, D head width, N tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.runtime.kv_cache import bind_caches, share_caches


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """What one layer needs for one sequence, and which layers use another one's memory."""

    num_layers: int
    num_heads: int
    head_width: int
    dtype: torch.dtype
    device: torch.device
    shared: Mapping[int, int]

    def bytes_for(self, length: int) -> int:
        """Memory of a cache of so many places."""
        owners = self.num_layers - len(self.shared)
        return 2 * owners * self.num_heads * length * self.head_width * self.dtype.itemsize


def allocate(shape: CacheShape, length: int) -> dict[str, Tensor]:
    """One tensor [2, K, S, D] for each layer, keys first; sharing layers have that of their owner."""
    owners = [index for index in range(shape.num_layers) if index not in shape.shared]
    size = (2, shape.num_heads, length, shape.head_width)
    caches = {_name(index): torch.zeros(size, dtype=shape.dtype, device=shape.device) for index in owners}
    return share_caches(caches, {_name(index): _name(owner) for index, owner in shape.shared.items()})


def _name(index: int) -> str:
    return f"layers.{index}"


class StaticLayer:
    """The cache of one layer; `bind` gives it its memory."""

    def __init__(self) -> None:
        self.both_2KSD = torch.empty(0)

    def bind(self, cache: Tensor) -> None:
        self.both_2KSD = cache


class StaticCache:
    """What a text model of transformers takes as `past_key_values`: each step says where its tokens go.

    places_N   the places that the step's tokens take
    visible    how many places attention sees; None shows all, for a graph of one fixed shape
    """

    is_compileable = True

    def __init__(self, shape: CacheShape, length: int) -> None:
        self.length = length
        self.num_tokens = 0
        self.layers = [StaticLayer() for _ in range(shape.num_layers)]
        bind_caches(allocate(shape, length), {_name(at): layer for at, layer in enumerate(self.layers)})
        self.places_N = torch.arange(0, device=shape.device)
        self.visible: int | None = None

    def advance(self, count: int, *, show_all: bool) -> int:
        """Make room for the next tokens; returns how many were there before."""
        before, after = self.num_tokens, self.num_tokens + count
        if after > self.length:
            raise InputError(
                f"cache: {after} tokens, its memory was taken for {self.length}. Ask for more room at first."
            )
        self.places_N = torch.arange(before, after, device=self.places_N.device)
        self.visible = None if show_all else after
        self.num_tokens = after
        return before

    def update(
        self, keys_1KND: Tensor, values_1KND: Tensor, layer_index: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values; give those that attention sees."""
        both_2KSD = self.layers[layer_index].both_2KSD
        both_2KSD[0].index_copy_(1, self.places_N, keys_1KND[0])
        both_2KSD[1].index_copy_(1, self.places_N, values_1KND[0])
        shown_2KSD = both_2KSD if self.visible is None else both_2KSD[:, :, : self.visible]
        return shown_2KSD[:1], shown_2KSD[1:]

    def get_seq_length(self, layer_index: int = 0) -> int:
        """Tokens before this step; asked for by models that find positions themselves."""
        return self.num_tokens
