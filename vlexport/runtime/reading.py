"""From what a caller names to items that an engine takes, each checked by itself before it meets others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlexport import media
from vlexport.errors import InputError, LimitError, MediaError
from vlexport.media import MediaLimits
from vlexport.positions.rules import merged_sides
from vlexport.runtime.embedding_cache import EmbeddingCache, item_key, pixels_key
from vlexport.runtime.encoder import Medium, Tower
from vlexport.runtime.encoding import Encoded
from vlexport.specs import MediaItem, Pixels

if TYPE_CHECKING:
    from vlexport.runtime.requests import Source


def read_pixels(kind: str, source: object, fps: float | None, limits: MediaLimits) -> Pixels:
    """Decoded frames of one source; frames that are decoded already are held to the same limits."""
    if not isinstance(source, Pixels):
        if kind == "image":
            return media.read_image(source, limits)  # type: ignore[arg-type]
        return media.read_video(source, fps=fps, limits=limits)  # type: ignore[arg-type]
    if source.kind != kind:
        raise MediaError(
            f"frames of kind '{source.kind}' given as {kind}. Pass them among the {source.kind}s."
        )
    if source.frames.ndim != 4:
        raise MediaError(
            f"{kind}: frames of shape {list(source.frames.shape)} given, [frames, height, width, 3] expected."
        )
    limits.check_frames(kind, *source.frames.shape[:3])
    return source


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Add a file's name to a limit that it exceeds once it is decoded, where only pixels are known."""
    try:
        yield
    except LimitError as error:
        if not isinstance(source, Path | str):
            raise
        raise LimitError(f"{source}: {error}") from error


class MediaReader:
    """Reads and preprocesses for one tower; media whose embeddings are kept are not even preprocessed."""

    def __init__(self, tower: Tower, cache: EmbeddingCache) -> None:
        self.tower = tower
        self.cache = cache

    def read(self, kind: str, source: Source, fps: float | None, limits: MediaLimits) -> Medium:
        """One image or video, ready for the engine or, where it is known, with its embeddings."""
        if isinstance(source, Encoded):
            return self._embeds(kind, source)
        if isinstance(source, MediaItem):
            self._check_item(kind, source)
            key = item_key(source, self.tower.settings)
            known = self.cache.find(key)
            return Medium(item=source, key=key, encoded=known.encoded if known else None)
        pixels = read_pixels(kind, source, fps, limits)
        key = pixels_key(pixels, self.tower.settings)
        known = self.cache.find(key)
        if known:
            return Medium(item=known.item, key=key, encoded=known.encoded)
        with naming(source):
            return Medium(item=self.tower.recipe.preprocess(self.tower.config, pixels), key=key)

    def _check_item(self, kind: str, item: MediaItem) -> None:
        _check_kind(kind, item.kind)
        _check_grid(kind, item.grid)
        check_rows(f"{kind} patches", item.patches, self.tower.recipe.row_width(self.tower.config))
        if item.patches.dtype != torch.float32:
            raise InputError(f"{kind} patches: {item.patches.dtype} given, torch.float32 expected.")
        # What the family refuses, it refuses here, before the item shares a call with others.
        self.tower.recipe.prepare(self.tower.config, [item], self.tower.bundle.manifest.attention_form)

    def _embeds(self, kind: str, given: Encoded) -> Medium:
        _check_kind(kind, given.kind)
        _check_grid(kind, given.grid)
        merged_sides(given.grid, self.tower.recipe.merge(self.tower.config))
        width = self.tower.bundle.manifest.outputs[0].shape[-1]
        check_rows(f"{kind} embeddings", given.embeds, width)
        item = MediaItem(
            kind=kind,
            patches=torch.empty(0),
            grid=given.grid,
            seconds_per_grid=given.seconds_per_grid,
        )
        total = self.tower.num_tokens(item)
        expected = total if given.kept is None else len(_checked_kept(given.kept, total))
        if len(given.embeds) != expected:
            raise InputError(
                f"{kind} embeddings: {len(given.embeds)} rows given, {expected} expected for grid "
                f"{tuple(given.grid)}. Pass the grid, in patches, that they were encoded with."
            )
        return Medium(item=item, encoded=given)


def check_rows(name: str, rows: object, width: object) -> None:
    """Refuse what is no matrix of finite floating point rows of this width."""
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != width:
        raise InputError(f"{name}: {_name(rows)} given, a tensor [rows, {width}] expected.")
    if not rows.is_floating_point() or not torch.isfinite(rows).all():
        raise InputError(
            f"{name}: {rows.dtype} with NaN, infinite or whole numbers given, finite floating point values "
            "expected. Make them again from the pixels."
        )


def _checked_kept(kept: object, total: int) -> Tensor:
    is_list = isinstance(kept, Tensor) and kept.dtype == torch.int64 and kept.ndim == 1 and len(kept) > 0
    if not isinstance(kept, Tensor) or not is_list or not _ascends(kept, total):
        raise InputError(
            f"kept: {_name(kept)} given, ascending int64 indices below {total} expected, as `encode` gives "
            "them."
        )
    return kept


def _ascends(kept: Tensor, total: int) -> bool:
    return int(kept[0]) >= 0 and int(kept[-1]) < total and bool((kept.diff() > 0).all())


def _check_kind(kind: str, given: str) -> None:
    if given != kind:
        raise InputError(f"an item of kind '{given}' given as {kind}. Pass it among the {given}s.")


def _check_grid(kind: str, grid: object) -> None:
    fine = isinstance(grid, tuple | list) and len(grid) == 3
    if not fine or any(type(side) is not int or not 1 <= side < 2**31 for side in grid):  # type: ignore[attr-defined]
        raise InputError(
            f"{kind}: grid {grid} given; frames, rows and columns in patches expected, whole numbers from 1."
        )


def _name(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
