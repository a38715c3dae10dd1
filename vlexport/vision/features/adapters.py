"""Parts of classes that read sizes on the host, with tables and segments of the call in their place.

N patches, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlexport.errors import UnsupportedError
from vlexport.vision.features.calls import current
from vlexport.vision.resampler import GroupAttention


def adapt(model: nn.Module) -> None:
    """Replace what cannot be traced, wherever a class has it; results are those of the class."""
    part: Any
    for part in model.modules():
        if hasattr(part, "interpolated_method"):
            part.forward = _stretching(part)
        if hasattr(part, "resize_positional_embeddings"):
            part.resize_positional_embeddings = _resized
        if hasattr(part, "probe") and isinstance(getattr(part, "attention", None), nn.MultiheadAttention):
            part.attention.forward = _pooling(part.attention)
        if hasattr(part, "patch_positional_embedding"):
            part.patch_positional_embedding.register_forward_pre_hook(
                lambda _, given: (given[0], current().rows["positions"])
            )


def _stretching(part: Any) -> Any:
    """Return a forward that adds a table of positions by its taps, in place of sampling a grid."""

    def forward(embeddings: Tensor, *_: object) -> Tensor:
        rows, table = current().rows, part.position_embedding.weight
        entries_K, shares_K = rows["taps"].unbind(1), rows["tap_weights"].unbind(1)
        for entry_N, share_N in zip(entries_K, shares_K, strict=True):
            added = torch.nn.functional.embedding(entry_N, table).float() * share_N[:, None]
            embeddings = embeddings + added.to(embeddings.dtype)
        return embeddings

    return forward


def _resized(table: Tensor, *_: object, **__: object) -> Tensor:
    """Return the table resized to every frame, by the share that each patch has of each of its entries."""
    if "tap_weights" not in current().rows:
        raise UnsupportedError(
            "the class resizes its positions for each picture, and has no table of shares."
        )
    resized: Tensor = current().rows["tap_weights"] @ table.flatten(0, 1).float()
    return resized.to(table.dtype)[None]


def _pooling(attention: Any) -> Any:
    """Return a forward in which a learned query takes one row from every frame of a call."""
    whole, attention.heads = attention.forward, attention.num_heads
    attention.scale = attention.head_dim**-0.5

    def forward(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, None]:
        call = current()
        if call.groups is None:
            found: tuple[Tensor, None] = whole(query, key, value, **given)
            return found
        mixed = GroupAttention.forward(attention, query[0], key[0], value[0], call.groups)
        return mixed[:, None], None

    return forward
