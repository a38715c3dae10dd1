"""Embeddings of media seen before, found by what the media are made of.

A key is the SHA-256 over everything that shapes the embeddings: what the item is, the engine's own
identity, settings, dtype, shape and every byte. Equal bytes of another shape, dtype or rate have another key.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.runtime.outputs import Encoded
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.static_shapes import to_device

DOMAIN = "vlexport embeddings 1"


def pixels_key(pixels: Pixels, settings: Mapping[str, object]) -> bytes:
    """Return the key of decoded frames under these settings."""
    times = {"rate": pixels.frames_per_second, "times": pixels.seconds, "first": pixels.first}
    times |= {"size": pixels.size}
    what = {"of": "pixels", "kind": pixels.kind, **times}
    return _key(what, pixels.frames, settings)


def item_key(item: MediaItem, settings: Mapping[str, object]) -> bytes:
    """Return the key of an item that came preprocessed."""
    what = {
        "of": "patches",
        "kind": item.kind,
        "grid": item.grid,
        "seconds": item.seconds_per_grid,
        "slices": item.slices,
        "groups": item.frame_groups,
        "times": item.frame_seconds,
        "numbers": item.frame_numbers,
        "cells": None if item.cells is None else item.cells.tolist(),
    }
    return _key(what, item.patches, settings)


def _key(what: Mapping[str, object], values: Tensor, settings: Mapping[str, object]) -> bytes:
    whole = values.detach().cpu().contiguous()
    head = [DOMAIN, dict(what), dict(settings), str(whole.dtype), list(whole.shape)]
    text = json.dumps(head, sort_keys=True, default=dict).encode()
    digest = hashlib.sha256(len(text).to_bytes(8, "big") + text)
    if whole.numel():
        digest.update(whole.view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An item without its patches, and its embeddings before any pruning, in memory of the host.

    `device` is where they came from, and where `find` returns them; `ready` follows the copy to the host.
    """

    item: MediaItem
    encoded: Encoded
    device: torch.device
    ready: torch.cuda.Event | None

    @property
    def num_bytes(self) -> int:
        tensors = (self.encoded.embeds, *self.encoded.layers.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class EmbeddingCache:
    """Entries up to a number of bytes; the one that was not used for longest goes first."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise InputError(f"cache_bytes: {max_bytes} given, 0 (no cache) or more expected.")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> Entry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        if entry.ready is not None:
            entry.ready.wait()

        def given_out(rows: Tensor) -> Tensor:
            # Callers may write into what they are given.
            return rows.clone() if entry.device.type == "cpu" else to_device(rows, entry.device)

        return replace(entry, encoded=_each(entry.encoded, given_out))

    def store(self, key: bytes, item: MediaItem, encoded: Encoded) -> None:
        device = encoded.embeds.device
        owned = _each(encoded, _on_host)
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        cells = None if item.cells is None else item.cells.clone()
        blank = replace(item, patches=item.patches[:0].clone(), cells=cells)
        entry = Entry(item=blank, encoded=owned, device=device, ready=ready)
        if entry.num_bytes > self.max_bytes:
            return
        with self._lock:
            before = self._entries.pop(key, None)
            self.num_bytes += entry.num_bytes - (before.num_bytes if before else 0)
            self._entries[key] = entry
            while self.num_bytes > self.max_bytes:
                _, gone = self._entries.popitem(last=False)
                self.num_bytes -= gone.num_bytes

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0


def copied(encoded: Encoded) -> Encoded:
    """Return embeddings in memory of their own."""
    return _each(encoded, Tensor.clone)


def _each(encoded: Encoded, change: Callable[[Tensor], Tensor]) -> Encoded:
    layers = {name: change(rows) for name, rows in encoded.layers.items()}
    kept, mask = (None if rows is None else change(rows) for rows in (encoded.kept, encoded.mask))
    return replace(encoded, embeds=change(encoded.embeds), layers=layers, kept=kept, mask=mask)


def _on_host(rows: Tensor) -> Tensor:
    """Copy rows to the host without a wait; a view would keep the memory of its neighbours alive."""
    if not rows.is_cuda:
        return rows.clone()
    return torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
