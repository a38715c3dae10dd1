"""The reference of the generic recipe: the class as it is, with its own attention, masks and tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from vlexport.specs import MediaItem
from vlexport.vision.features.calls import Together
from vlexport.vision.features.classes import outputs_of
from vlexport.vision.features.packing import ImagePacking, TablePacking
from vlexport.vision.features.pixels import to_images
from vlexport.vision.features.tower import STRIP, image_features
from vlexport.vision.grid_tower import grids_of


class StockFeatures:
    """A class of transformers in float32, its attention in plain operators."""

    def __init__(self, module: Any, packing: ImagePacking | TablePacking, *, form: str) -> None:
        self.module, self.packing, self.form = module, packing, form

    @torch.inference_mode()
    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        if isinstance(self.packing, TablePacking):
            one = self._of_frames if self.form == STRIP else self._of_grid
            found = [one(item) for item in items]
            return {name: torch.cat([each[name] for each in found]) for name in found[0]}
        rule, patches = self.packing.rule, torch.cat([item.patches for item in items])
        pixels = to_images(patches, len(patches) // self.packing.unit, rule.side, rule.patch)
        # Classes with tiles are compared before they put these together by the size of the picture.
        together = Together() if hasattr(self.module, "pack_image_features") else nullcontext()
        with together:
            return outputs_of(image_features(self.module, pixels, self.form, rule.patch))

    def _of_grid(self, item: MediaItem) -> dict[str, Tensor]:
        """Run one item, videos by the method for videos: some classes cut their grids first."""
        if item.kind == "video" and hasattr(self.module, "get_video_features"):
            return outputs_of(self.module.get_video_features(item.patches, grids_of([item])))
        return outputs_of(self.module.get_image_features(item.patches, grids_of([item])))

    def _of_frames(self, item: MediaItem) -> dict[str, Tensor]:
        """Run every frame as an image of its own size."""
        patch, merge = self.packing.rule.patch, self.packing.merge
        frames, rows, columns = item.grid
        cells = (frames, rows // merge, columns // merge, merge, merge, 3, patch, patch)
        pixels = item.patches.reshape(cells).permute(0, 5, 1, 3, 6, 2, 4, 7)
        pixels = pixels.reshape(frames, 3, rows * patch, columns * patch)
        sizes = torch.tensor([[rows * patch, columns * patch]])
        # Classes cannot cut a single row off an image of one.
        with Together():
            calls = [self.module.get_image_features(each[None], image_sizes=sizes) for each in pixels]
        found = [outputs_of(each) for each in calls]
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}

    def blocks(self, items: Sequence[MediaItem]) -> list[tuple[Tensor, Tensor]]:
        """Return nothing: where blocks begin and end is the class's own affair."""
        return []
