"""Parts of classes that compute positions from sizes on the host, with tables of the call in their place.

N patches, K taps.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.vision.features.calls import current


def adapt(model: nn.Module) -> None:
    """Replace what cannot be traced, wherever a class has it; results are those of the class."""
    for part in model.modules():
        if hasattr(part, "interpolated_method"):
            part.forward = _stretching(part)
        if hasattr(part, "resize_positional_embeddings"):
            part.resize_positional_embeddings = _resized_once(part.resize_positional_embeddings)
        if hasattr(part, "patch_positional_embedding"):
            rotary: Any = part.patch_positional_embedding
            rotary.register_forward_pre_hook(lambda _, given: (given[0], current().rows["positions"]))


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


def _resized_once(resize: Any) -> Any:
    """Return a resize of positions for images that are all of the side of the table: once for all of them."""

    def once(table: Tensor, _: Tensor, max_length: int) -> Tensor:
        one = SimpleNamespace(tolist=lambda: list(table.shape[:2]))
        resized: Tensor = resize(table, _One(one), max_length=max_length)
        return resized

    return once


class _One(list[Any]):
    """A list of the one size of all images, which has a shape as a tensor has."""

    def __init__(self, size: object) -> None:
        super().__init__([size])
        self.shape = (1, 2)
