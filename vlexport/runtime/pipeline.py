"""Images and videos through an engine: decode, preprocess, prepare, run, split by item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from vlexport import media
from vlexport.backends import Engine, Options
from vlexport.bundle import Bundle
from vlexport.compiled import evs
from vlexport.compiled.positions import check_rate
from vlexport.errors import InputError, UnsupportedError
from vlexport.recipe import Recipe
from vlexport.runtime.encoding import Encoded
from vlexport.runtime.opening import open_engine, recipe_of
from vlexport.specs import MediaItem, Pixels

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

    ImageSource = str | Path | bytes | Image | np.ndarray | Tensor | Pixels
    VideoSource = str | Path | np.ndarray | Tensor | Pixels


NOTHING = "nothing to encode: at least one image or video is expected. Pass some with --image or --video."


class Pipeline:
    """An engine and what goes around it. Close it, or use it in a `with` statement."""

    def __init__(self, bundle: Bundle, engine: Engine, recipe: Recipe[Any]) -> None:
        self.bundle = bundle
        self.engine = engine
        self.recipe = recipe
        self.config = recipe.parse_config(bundle.manifest.preprocessing)

    def encode(
        self,
        *,
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        fps: float | None = None,
        prune: float | None = None,
        limits: media.MediaLimits | None = None,
    ) -> list[Encoded]:
        """All images, then all videos, in one engine call; results in the same order.

        `prune` is the share of each video's tokens to drop; images stay whole.
        """
        if not images and not videos:
            raise InputError(NOTHING)
        if prune is not None:
            self._check_prunable(prune)
        bounds = limits or media.MediaLimits()
        pixels = [
            *(_image(source, bounds) for source in images),
            *(_video(source, fps, bounds) for source in videos),
        ]
        items = [self.preprocess(each) for each in pixels]
        if not prune:
            return self.encode_items(items)
        for item in items:
            _check_timed(item)
        return [self._pruned(each, prune) for each in self.encode_items(items)]

    def preprocess(self, pixels: Pixels) -> MediaItem:
        """Pixels as the family's own preprocessing makes them."""
        return self.recipe.preprocess(self.config, pixels)

    def encode_items(self, items: Sequence[MediaItem]) -> list[Encoded]:
        """Preprocessed items in one engine call."""
        if not items:
            raise InputError(NOTHING)
        inputs = self.recipe.prepare(self.config, items, self.bundle.manifest.attention_form)
        outputs = self.engine.run(inputs)
        counts = [self.recipe.num_tokens(self.config, item) for item in items]
        main, *others = self.recipe.outputs
        parts = {name: outputs[name].split(counts) for name in self.recipe.outputs}
        return [
            Encoded(
                kind=item.kind,
                embeds=parts[main][index],
                grid=item.grid,
                seconds_per_grid=item.seconds_per_grid,
                layers={name: parts[name][index] for name in others},
            )
            for index, item in enumerate(items)
        ]

    def _check_prunable(self, rate: float) -> None:
        check_rate(rate)
        if rate and self.recipe.pruning_rule is None:
            raise UnsupportedError(
                f"recipe '{self.recipe.name}' has no spatial video tokens to prune. Leave out --prune."
            )

    def _pruned(self, item: Encoded, rate: float) -> Encoded:
        if item.kind != "video":
            return item
        unit = self.recipe.merge(self.config)
        pruned = evs.prune(item.embeds, item.grid, unit, rate)
        mask = torch.zeros(len(item.embeds), dtype=torch.bool)
        mask[pruned.kept] = True
        return replace(item, embeds=pruned.embeds, kept=pruned.kept, mask=mask)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(
    bundle: str | Path,
    *,
    trust: str | None = None,
    allow_failed: bool = False,
    recipe: str | None = None,
    options: Options | None = None,
) -> Pipeline:
    """Open a bundle for use; `trust` approves a bundle from elsewhere by its digest."""
    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    found = recipe_of(opened, recipe)
    return Pipeline(opened, open_engine(opened, allow_failed=allow_failed, options=options), found)


def _check_timed(item: MediaItem) -> None:
    if item.kind == "video" and item.seconds_per_grid is None:
        raise InputError(
            "pruning a video needs the time between its frames, for the positions of what is kept. "
            "Pass the frame rate with --fps (fps=)."
        )


def _image(source: ImageSource, limits: media.MediaLimits) -> Pixels:
    return source if isinstance(source, Pixels) else media.read_image(source, limits)


def _video(source: VideoSource, fps: float | None, limits: media.MediaLimits) -> Pixels:
    return source if isinstance(source, Pixels) else media.read_video(source, fps=fps, limits=limits)
