"""Code beside a MiniCPM-V checkpoint, as its publishers put it there: config and processors for `auto_map`.

Slices and words are those of the recipe: what is compared is the tower, and both sides are given the same.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoTokenizer, BatchFeature, PreTrainedTokenizerFast, Qwen3Config, SiglipVisionConfig
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin
from vlexport.recipes.minicpmv import SliceRule, best_cut, image_text, to_slices

from vlexport.specs import Pixels
from vlexport.vision.slices import slice_sizes


class MiniCPMVConfig(Qwen3Config):
    """Numbers of every decoder of the family; those of Qwen3 are a superset."""

    model_type = "minicpmv"

    def __init__(self, vision_config: dict | None = None, **numbers) -> None:
        super().__init__(**numbers)
        self.vision_config = SiglipVisionConfig(**(vision_config or {}))


class MiniCPMVTokenizerFast(PreTrainedTokenizerFast):
    """Knows the tokens around the rows of an image."""

    @property
    def im_start_id(self) -> int:
        found: int = self.get_vocab()["<image>"]
        return found

    @property
    def im_end_id(self) -> int:
        found: int = self.get_vocab()["</image>"]
        return found


class MiniCPMVImageProcessor(BaseImageProcessor):
    """Cuts images into slices, each a strip of patches."""

    def __init__(
        self, *, max_slice_nums=9, scale_resolution=448, patch_size=14, version="2.6", **others
    ) -> None:
        super().__init__(**others)
        self.max_slice_nums, self.scale_resolution = max_slice_nums, scale_resolution
        self.patch_size, self.version = patch_size, str(version)
        self.image_feature_size: int = others["image_feature_size"]

    def _rule(self, max_slice_nums: int | None) -> SliceRule:
        half = (0.5, 0.5, 0.5)
        most = self.max_slice_nums if max_slice_nums is None else max_slice_nums
        return SliceRule(
            patch=self.patch_size, side=self.scale_resolution, max_cells=most, mean=half, std=half
        )

    def preprocess(self, images, max_slice_nums=None, **_) -> BatchFeature:
        found: dict[str, list] = {"pixel_values": [], "image_sizes": [], "tgt_sizes": []}
        # Images of a prompt in a list, frames of a video in an array, or the images of one prompt.
        nested = isinstance(images[0], list) or getattr(images[0], "ndim", 3) == 4
        for prompt in images if nested else [images]:
            strips: list[torch.Tensor] = []
            sizes: list[tuple[int, int]] = []
            all_grids: list[tuple[int, int]] = []
            for image in prompt:
                frame = np.asarray(image if isinstance(image, np.ndarray) else image.convert("RGB"))
                pixels = Pixels(kind="image", frames=torch.from_numpy(frame.copy())[None])
                item = to_slices(self._rule(max_slice_nums), pixels)
                grids = slice_sizes(item)
                rows = item.patches.split([high * wide for high, wide in grids])
                side = self.patch_size
                strips += [
                    each.unflatten(1, (3, side, side)).permute(1, 2, 0, 3).flatten(2).contiguous()
                    for each in rows
                ]
                sizes.append((frame.shape[1], frame.shape[0]))
                all_grids += grids
            found["pixel_values"].append(strips)
            found["image_sizes"].append(sizes)
            found["tgt_sizes"].append(torch.tensor(all_grids, dtype=torch.int32))
        return BatchFeature(data=found)

    def get_sliced_grid(self, image_size, max_slice_nums=None, **_):
        width, height = image_size
        rule = self._rule(max_slice_nums)
        cut = best_cut((height, width), rule.side, rule.max_cells)
        return cut and (cut[1], cut[0])

    def get_slice_image_placeholder(
        self, image_size, image_idx=0, max_slice_nums=None, use_image_id=True, **_
    ) -> str:
        grid = self.get_sliced_grid(image_size, max_slice_nums)
        early = self.version in ("2.0", "2.5")
        apart = not early and use_image_id
        text: str = image_text(
            image_idx if apart else None,
            grid and (grid[1], grid[0]),
            self.image_feature_size,
            cells_apart=apart,
        )
        return text


class MiniCPMVProcessor(ProcessorMixin):
    """Holds the tokenizer; vLLM has a processor of its own for the rest."""

    attributes = ("tokenizer",)
    tokenizer_class = "AutoTokenizer"

    @classmethod
    def from_pretrained(cls, path, **options):  # type: ignore[override]  # fewer options
        return cls(tokenizer=AutoTokenizer.from_pretrained(path, **options))
