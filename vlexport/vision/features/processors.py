"""Pictures by the image processor of transformers that a checkpoint names, tiles included.

Its settings are stored whole: those of the checkpoint's file, then what the model's processor of text and
images passes to it, then the class's own. A switch that the processor of text and images turns on is on: the
files of InternVL have theirs off. N patches, P values of a patch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vlexport.codec import JsonObject, canonical, encode, parse
from vlexport.errors import UNEXPECTED, CheckpointError, InputError, UnsupportedError
from vlexport.specs import Pixels
from vlexport.vision.preprocess import channels_first

# Pixels of a side, or tiles, that settings may name: twice what released models have.
MOST = 8192
# The pipeline that processors of videos of one size share, and the switches that all of them have on.
FRAMES = "processor of video frames"
OF_FRAMES = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_NOT_SETTINGS = (
    "image_processor_type", "feature_extractor_type", "video_processor_type", "processor_class",
    "_processor_class", "auto_map", "return_tensors",
)  # fmt: skip
ENCODE_ITEMS = (
    "Preprocess with transformers, and pass patches and grid as a MediaItem to `Pipeline.encode_items`; "
    "docs/generic.md shows how."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """A class of transformers by name, with all its settings; none where it cannot be made here.

    is_named  by the checkpoint's file; else it is the usual one of the model type
    """

    name: str
    settings: JsonObject
    is_named: bool = True

    @classmethod
    def of(cls, model_type: str, stored: dict[str, Any]) -> Processor:
        """Return the processor of images of a checkpoint's file."""
        named = stored.get("image_processor_type") or stored.get("feature_extractor_type")
        name = re.sub(r"(Fast|Pil)$", "", str(named or _usual(model_type)))
        name = name.replace("FeatureExtractor", "ImageProcessor")
        kind = _class_of(name)
        if kind is None:
            return cls(name=name, settings={}, is_named=bool(named))
        passed = _passed(model_type)
        on = {key: each for key, each in passed.items() if each is True}
        given = {key: each for key, each in (passed | stored | on).items() if key not in _NOT_SETTINGS}
        try:
            made = kind(**given)
        except ImportError:
            return cls(name=name, settings={}, is_named=bool(named))
        except UNEXPECTED as error:
            raise CheckpointError(
                f"processor settings: {name} does not take them ({' '.join(str(error).split())[:300]}). "
                "Check preprocessor_config.json."
            ) from error
        known = {key: _plain(each) for key, each in made.to_dict().items() if each is not None}
        settings = {key: each for key, each in known.items() if key not in _NOT_SETTINGS}
        return cls(name=name, settings=settings, is_named=bool(named))

    @classmethod
    def of_frames(cls, stored: Mapping[str, Any]) -> Processor | None:
        """Return the processor of videos that makes one image of each frame; None if the file names none."""
        if "video_processor_type" not in stored:
            return None
        settings = {key: each for key, each in stored.items() if key not in _NOT_SETTINGS}
        missing = [key for key in ("size", "resample", "image_mean", "image_std") if key not in stored]
        return cls(name=FRAMES, settings={} if missing else {**OF_FRAMES, **settings})

    def cut_into(self, units: Mapping[str, int]) -> Processor:
        """Return the processor with the sides of a tower, where it has settings for them.

        Pixtral's `patch_size` is the side of a merger's cell, as its processor of text and images passes it.
        """
        return replace(
            self, settings={**self.settings, **{key: units[key] for key in units if key in self.settings}}
        )

    def images(self, pixels: Pixels) -> list[Mapping[str, Tensor]]:
        """Return what the processor makes of an image, or of each frame of a video."""
        from PIL import Image

        if not self.settings:
            raise InputError(f"{pixels.kind}: how '{self.name}' resizes is not known here. {ENCODE_ITEMS}")
        processor = _made(self.name, canonical(self.settings))
        frames = channels_first(pixels.frames).permute(0, 2, 3, 1).cpu().numpy()
        try:
            return [processor(Image.fromarray(frame), return_tensors="pt") for frame in frames]
        except UNEXPECTED as error:
            raise InputError(
                f"{pixels.kind} of {pixels.frames.shape[2]}x{pixels.frames.shape[1]} pixels: '{self.name}' "
                f"does not take it ({' '.join(str(error).split())[:200]}). Resize it, or crop it."
            ) from error


@lru_cache(maxsize=16)
def _made(name: str, settings: bytes) -> Any:
    from transformers.image_processing_backends import PilBackend

    kind = PilBackend if name == FRAMES else _class_of(name)
    if kind is None:
        raise UnsupportedError(
            f"the installed transformers has no '{name}', which prepares pictures of this bundle. Install "
            f"the version that built it. {ENCODE_ITEMS}"
        )
    return kind(**encode(parse(settings)))


def _class_of(name: str) -> Any:
    """Return the class that computes with Pillow and NumPy, or the only one; None where it cannot be had."""
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    for each in (f"{name}Pil", name):
        try:
            found = get_image_processor_class_from_name(each)
            if found is not None and hasattr(found, "preprocess"):
                return found
        except ImportError:
            # Without torchvision.
            continue
    return None


def _usual(model_type: str) -> str:
    """Return the name of the processor that transformers takes for a file without one."""
    auto: Any = importlib.import_module("transformers.models.auto.image_processing_auto")
    found = auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {})
    return str(found.get("torchvision") or found.get("pil") or "unknown")


def _passed(model_type: str) -> dict[str, Any]:
    """Return what the processor of text and images of a model type passes to that of images."""
    auto: Any = importlib.import_module("transformers.models.auto.processing_auto")
    name = auto.PROCESSOR_MAPPING_NAMES.get(model_type)
    kind = auto.processor_class_from_name(name) if name else None
    try:
        defaults = getattr(getattr(kind, "valid_processor_kwargs", None), "_defaults", {})
        return {**getattr(kind, "images_kwargs", {}), **defaults.get("images_kwargs", {})}
    except ImportError:
        # Pixtral's alone is not there without torchvision; it passes the side of a cell, as the recipe does.
        return {}


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it: sizes as objects, filters as numbers."""
    if isinstance(value, Mapping) or hasattr(value, "__dataclass_fields__"):
        return {key: _plain(each) for key, each in dict(value).items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value if isinstance(value, str | float | bool | None) else str(value)


def check_sizes(value: object, where: str = "processor settings") -> None:
    """Refuse sides, and numbers of tiles, that no tower of one size has."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_sizes(each, f"{where}, {key}")
    elif isinstance(value, list | tuple):
        for each in value:
            check_sizes(each, where)
    elif isinstance(value, int | float) and abs(value) > MOST:
        raise CheckpointError(
            f"{where}: {value} given, at most {MOST} expected. Check preprocessor_config.json."
        )


def by_channel(rows_NP: Tensor) -> Tensor:
    """Return rows whose values lay pixel by pixel channel by channel."""
    found: Tensor = rows_NP.unflatten(1, (-1, 3)).transpose(1, 2).flatten(1)
    return found


def whole(values: Mapping[str, Tensor], name: str) -> Tensor:
    """Return an output that a processor has to give, as floats where it is one."""
    found = values.get(name)
    if not isinstance(found, Tensor):
        raise InputError(
            f"the processor gave no '{name}', but {', '.join(values) or 'nothing'}. {ENCODE_ITEMS}"
        )
    return found.to(torch.float32) if found.is_floating_point() else found
