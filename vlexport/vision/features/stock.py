"""The reference of the generic recipe: the class as it is, with its own attention, masks and tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.specs import MediaItem
from vlexport.vision.features.calls import FunctionMode, UncutRows
from vlexport.vision.features.classes import rows_and_levels
from vlexport.vision.features.packing import ImagePacking, TablePacking
from vlexport.vision.features.pixels import PictureRule
from vlexport.vision.features.tower import MERGES, NESTED, PATCHES, RASTER, STRIP
from vlexport.vision.grid_tower import grids_of


class StockFeatures:
    """A class of transformers in float32, its attention in plain operators."""

    def __init__(self, module: Any, packing: ImagePacking | TablePacking, *, form: str) -> None:
        self.module, self.packing, self.form = module, packing, form

    @torch.inference_mode()
    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        if isinstance(rule := self.packing.rule, PictureRule):
            rows = torch.cat([item.patches for item in items])
            calls = [_named(self.module.get_image_features(**rule.arguments(row))) for row in rows]
            return {name: torch.cat([call[name] for call in calls]) for name in calls[0]}
        if isinstance(self.packing, ImagePacking):
            return _named(self._of_images(torch.cat([item.patches for item in items]), self.packing))
        one = {STRIP: self._of_frames, PATCHES: self._of_patches}.get(self.form, self._of_grid)
        outputs = [_named(features) for item in items for features in one(item)]
        return {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}

    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Return outputs and no blocks: where these begin and end is the class's own affair."""
        return self.run(items), []

    def _of_images(self, patches: Tensor, packing: ImagePacking) -> Any:
        side, patch = packing.rule.side, packing.rule.patch
        rows = patches.unflatten(0, (-1, packing.unit))
        images = F.fold(rows.transpose(1, 2), side, patch, stride=patch)
        if not hasattr(self.module, "pack_image_features"):
            return self.module.get_image_features(images[None] if self.form == NESTED else images)
        # Classes with tiles are compared before they put these together by the size of the picture.
        with UncutRows():
            return self.module.get_image_features(images, image_sizes=[])

    def _of_patches(self, item: MediaItem) -> list[Any]:
        frames, rows, columns = item.grid
        padding = max(0, self.packing.capacity(1, 1)[0] - rows * columns)
        # Values of a pixel lie side by side here.
        by_pixel = item.patches.reshape(frames, rows * columns, 3, -1).permute(0, 1, 3, 2).flatten(2)
        mask = F.pad(torch.ones(frames, rows * columns, dtype=torch.int64), (0, padding))
        with _AnyColumns():
            features = self.module.get_image_features(
                pixel_values=F.pad(by_pixel, (0, 0, 0, padding)),
                pixel_attention_mask=mask,
                spatial_shapes=torch.tensor([[rows, columns]] * frames),
            )
        return [features]

    def _of_grid(self, item: MediaItem) -> list[Any]:
        videos = item.kind == "video" and hasattr(self.module, "get_video_features")
        method = self.module.get_video_features if videos else self.module.get_image_features
        if self.form != RASTER:
            return [method(item.patches, grids_of([item]))]
        (frames, rows, columns), merge = item.grid, self.packing.merge
        cells = item.patches.unflatten(0, (frames, rows // merge, columns // merge, merge, merge))
        patches = cells.transpose(2, 3).reshape(len(item.patches), 3, self.packing.rule.patch, -1)
        names = inspect.signature(self.module.get_image_features).parameters
        merges = [torch.tensor([merge])] if MERGES in names else []
        return [method(patches, grids_of([item]), *merges)]

    def _of_frames(self, item: MediaItem) -> list[Any]:
        """Run every frame as an image of its own size; classes cannot cut one row off an image of one."""
        patch, merge = self.packing.rule.patch, self.packing.merge
        frames, rows, columns = item.grid
        cells = (frames, rows // merge, columns // merge, merge, merge, 3, patch, patch)
        pixels = item.patches.reshape(cells).permute(0, 5, 1, 3, 6, 2, 4, 7)
        pixels = pixels.reshape(frames, 3, rows * patch, columns * patch)
        sizes = torch.tensor([[rows * patch, columns * patch]])
        with nullcontext() if rows * columns > merge**2 else UncutRows():
            return [self.module.get_image_features(image[None], image_sizes=sizes) for image in pixels]


class _AnyColumns(FunctionMode):
    """Resizes to a single column as to a single row; torch 2.13 repeats the first row in a column."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.interpolate and kwargs.get("antialias") and kwargs["size"][1] == 1:
            kwargs["size"] = kwargs["size"][::-1]
            return func(args[0].transpose(2, 3), **kwargs).transpose(2, 3)
        return func(*args, **kwargs)


def _named(features: Any) -> dict[str, Tensor]:
    rows, levels = rows_and_levels(features)
    outputs = {"embeds": rows, **{f"level_{number}": level for number, level in enumerate(levels)}}
    return {
        name: torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        for name, parts in outputs.items()
    }
