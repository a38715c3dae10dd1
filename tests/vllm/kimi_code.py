"""Code beside a Kimi-VL checkpoint, as its publishers put it there: processors for `auto_map`.

Pixels are those of the recipe: what is compared is the tower, and both sides are given the same.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoTokenizer, BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin
from vlexport.recipes.kimi_vl import image_rule, preprocess

from vlexport.checkpoint import Checkpoint
from vlexport.specs import Pixels
from vlexport.vision.preprocess import PatchRule


class KimiVLImageProcessor(BaseImageProcessor):
    """Makes images smaller, fills them up and cuts them into patches."""

    def __init__(self, *, patch_size=14, merge_kernel_size=(2, 2), in_token_limit=4096, **others) -> None:
        super().__init__(**others)
        self.patch_size, self.merge_kernel_size = patch_size, list(merge_kernel_size)
        self.in_token_limit = in_token_limit
        self.rule: PatchRule

    def preprocess(self, images, **_) -> BatchFeature:
        items = []
        for image in images:
            frames = torch.from_numpy(np.asarray(image.convert("RGB")).copy())[None]
            items.append(preprocess(SimpleNamespace(rule=self.rule), Pixels(kind="image", frames=frames)))
        side = self.patch_size
        patches = torch.cat([item.patches for item in items]).unflatten(1, (3, side, side))
        grids = torch.tensor([item.grid[1:] for item in items])
        return BatchFeature(data={"pixel_values": patches, "image_grid_hws": grids})


class KimiVLProcessor(ProcessorMixin):
    """Writes as many slots as an image has tokens."""

    attributes = ("tokenizer",)
    tokenizer_class = "AutoTokenizer"
    image_token = "<|media_pad|>"

    @classmethod
    def from_pretrained(cls, path, **options):  # type: ignore[override]  # fewer options
        made = cls(tokenizer=AutoTokenizer.from_pretrained(path, **options))
        made.image_processor = KimiVLImageProcessor.from_pretrained(path)
        made.image_processor.rule = image_rule(Checkpoint.open(path), 14, 2)
        return made

    def __call__(self, images=None, text=None, return_tensors=None, **_) -> BatchFeature:
        given = [text] if isinstance(text, str) else list(text)
        found = self.image_processor.preprocess(images) if images else BatchFeature()
        counts = iter(
            [high * wide // 4 for high, wide in found.get("image_grid_hws", torch.empty(0, 2)).tolist()]
        )
        parts = [each.split(self.image_token) for each in given]
        texts = [
            first + "".join(self.image_token * next(counts, 1) + rest for rest in others)
            for first, *others in parts
        ]
        return BatchFeature(data={**self.tokenizer(texts), **found}, tensor_type=return_tensors)
