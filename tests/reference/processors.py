"""transformers' own processors of images and videos, for judging settings, sizes and pixels.

Without torchvision some cannot be imported. They take one thing from it, the resize, which torch has too: so
a module of that name stands in while their source runs, and nothing of it stays.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor

# Arguments that its `_preprocess` takes.
PREPROCESS = (
    "size", "do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean",
    "image_std", "patch_size", "merge_size", "temporal_patch_size", "cap_pixels_per_frame",
)  # fmt: skip


_resize = Image.Image.resize


def resized_along_rows_first(
    image: Image.Image, size: tuple[int, int], resample: int, **known: Any
) -> Image.Image:
    """Resize in the order of passes of torchvision and of Pillow up to 12.3.

    Pillow 13.0 makes the vertical pass first where height shrinks much more than width (its pull request
    9549). Bytes are cut off between the passes, so on noise over all levels that changes values by up to 20
    levels, 723 of 32,928 by more than one (60x190 to 56x196, bicubic); by 2 where pixels change over 8.
    """
    resample = Image.Resampling(resample)
    across = _resize(image, (size[0], image.height), resample, **known)
    return _resize(across, size, resample, **known)


def their_image(settings: Mapping[str, Any], frame_HWC: Tensor) -> tuple[list[int], Tensor]:
    """Return grid and patches of the image processor in its PIL form, along rows first."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    with patch.object(Image.Image, "resize", resized_along_rows_first):
        made = Qwen2VLImageProcessorPil(**settings)(Image.fromarray(frame_HWC.numpy()), return_tensors="pt")
    return made["image_grid_thw"][0].tolist(), made["pixel_values"]


def their_video(
    settings: Mapping[str, Any], frames_THWC: Tensor, family: str = "qwen2_vl"
) -> tuple[list[int], Tensor]:
    """Return grid and patches of the video processor, resized by torch."""
    processor = video_class(family)(**settings)
    given = {name: getattr(processor, name) for name in PREPROCESS}
    given["size"] = SimpleNamespace(**given["size"])
    made = processor._preprocess([frames_THWC.permute(0, 3, 1, 2)], **given, return_tensors=None)
    return list(made["video_grid_thw"][0]), made["pixel_values_videos"]


class Base:
    """What processors take from their base: settings as attributes, and operations on tensors."""

    valid_kwargs = type("Kwargs", (), {})
    rescale_factor = 1 / 255

    def __init__(self, **settings: Any) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    def resize(self, image: Tensor, size: Any, resample: Any) -> Tensor:
        mode = "bilinear" if resample == 2 else "bicubic"
        made = F.interpolate(image.flatten(0, -4), (size.height, size.width), mode=mode, antialias=True)
        flat: Tensor = made.unflatten(0, image.shape[:-3])
        return flat

    def rescale_and_normalize(
        self, values: Tensor, do_rescale: bool, factor: float, do_normalize: bool, mean: Any, std: Any
    ) -> Tensor:
        values = values.double() * factor if do_rescale else values.double()
        if do_normalize:
            mean, std = (torch.tensor(each).double()[:, None, None] for each in (mean, std))
            values = (values - mean) / std
        return values


BASES = {
    "transformers.video_processing_utils": "BaseVideoProcessor",
    "transformers.image_processing_backends": "TorchvisionBackend",
}
TORCHVISION = "torchvision", "torchvision.transforms", "torchvision.transforms.v2"
FUNCTIONAL = "torchvision.transforms.v2.functional"


@cache
def processor_module(kind: str, family: str) -> Any:
    """Run the source of a processor with stand-ins for its base and for torchvision."""
    name = f"transformers.models.{family}.{kind}_processing_{family}"
    path = Path(transformers.__file__).parent / "models" / family / f"{kind}_processing_{family}.py"
    stand_ins: dict[str, Any] = {each: ModuleType(each) for each in (*BASES, *TORCHVISION, FUNCTIONAL)}
    for each, base in BASES.items():
        setattr(stand_ins[each], base, Base)
    stand_ins[TORCHVISION[-1]].functional = stand_ins[FUNCTIONAL]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def undocumented(given: Any = None, **_: object) -> Any:
        return given or (lambda each: each)

    with (
        patch.dict(sys.modules, {**stand_ins, name: module}),
        patch.object(transformers.utils, "auto_docstring", undocumented),
    ):
        spec.loader.exec_module(module)
    return module


def video_class(family: str = "qwen2_vl") -> Any:
    module = vars(processor_module("video", family))
    return next(each for name, each in module.items() if name.endswith("VLVideoProcessor"))
