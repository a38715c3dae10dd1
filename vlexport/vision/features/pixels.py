"""Pictures to rows of patches, by the image processor of transformers that a checkpoint names; with tiles.

A processor's settings are stored whole: those of the checkpoint's file, then what the model's processor of
text and images passes to it, then the class's own. A switch that the processor of text and images turns on is
on: the files of InternVL have theirs off.
T frames, B images, S side, P patch side, N patches.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vlexport.codec import JsonObject, canonical, encode, parse
from vlexport.errors import UNEXPECTED, CheckpointError, InputError, UnsupportedError
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.preprocess import (
    PatchRule,
    ResizeRule,
    channels_first,
    cut,
    normalisation,
    seconds_per_grid,
    to_patches,
)
from vlexport.vision.slices import rows_of_image

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
# Frames that an image counts for in bounds of a volume.
IMAGE_FRAMES = 2
# SigLIP 2's, where settings name none.
MOST_PATCHES = 256
# What a class takes, whose processor makes grids.
OF_GRIDS = ("grids", "raster")
# Patches along a side where a class has no patch size of its own.
PATCHES = (16, 8, 4, 2, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """A class of transformers by name and its settings, none if it cannot be made; `is_named` by the file."""

    name: str
    settings: JsonObject
    is_named: bool = True

    @classmethod
    def of(cls, model_type: str, stored: dict[str, Any]) -> Processor:
        named = stored.get("image_processor_type") or stored.get("feature_extractor_type")
        name = re.sub(r"(Fast|Pil)$", "", str(named or _usual(model_type)))
        name = name.replace("FeatureExtractor", "ImageProcessor")
        kind = _class_of(name)
        if kind is None:
            return cls(name=name, settings={}, is_named=bool(named))
        passed = _passed(model_type)
        on = {key: value for key, value in passed.items() if value is True}
        arguments = {key: value for key, value in (passed | stored | on).items() if key not in _NOT_SETTINGS}
        try:
            processor = kind(**arguments)
        except ImportError:
            return cls(name=name, settings={}, is_named=bool(named))
        except UNEXPECTED as error:
            raise CheckpointError(
                f"processor settings: {name} does not take them ({' '.join(str(error).split())[:300]}). "
                "Check preprocessor_config.json."
            ) from error
        plain = {key: _plain(value) for key, value in processor.to_dict().items() if value is not None}
        settings = {key: value for key, value in plain.items() if key not in _NOT_SETTINGS}
        return cls(name=name, settings=settings, is_named=bool(named))

    @classmethod
    def of_frames(cls, stored: Mapping[str, Any]) -> Processor | None:
        """Return the processor of videos that makes one image of each frame; None if the file names none."""
        if "video_processor_type" not in stored:
            return None
        settings = {key: value for key, value in stored.items() if key not in _NOT_SETTINGS}
        missing = [key for key in ("size", "resample", "image_mean", "image_std") if key not in stored]
        return cls(name=FRAMES, settings={} if missing else {**OF_FRAMES, **settings})

    def cut_into(self, units: Mapping[str, int]) -> Processor:
        """Return the processor with the sides of a tower, where it has settings for them.

        Pixtral's `patch_size` is the side of a merger's cell, as its processor of text and images passes it.
        """
        return replace(
            self, settings={**self.settings, **{key: units[key] for key in units if key in self.settings}}
        )

    def made(self) -> Any:
        """Return it as an object of transformers."""
        if not self.settings:
            raise InputError(f"how '{self.name}' resizes is not known here. {ENCODE_ITEMS}")
        return _made(self.name, canonical(self.settings))

    def images(self, pixels: Pixels) -> list[Mapping[str, Tensor]]:
        from PIL import Image

        processor = self.made()
        frames = channels_first(pixels).permute(0, 2, 3, 1).cpu().numpy()
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

    for candidate in (f"{name}Pil", name):
        try:
            kind = get_image_processor_class_from_name(candidate)
            if kind is not None and hasattr(kind, "preprocess"):
                return kind
        except ImportError:
            # Without torchvision.
            continue
    return None


def _usual(model_type: str) -> str:
    auto: Any = importlib.import_module("transformers.models.auto.image_processing_auto")
    names = auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {})
    return str(names.get("torchvision") or names.get("pil") or "unknown")


def _passed(model_type: str) -> dict[str, Any]:
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
    if isinstance(value, Mapping) or hasattr(value, "__dataclass_fields__"):
        return {key: _plain(item) for key, item in dict(value).items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value if isinstance(value, str | float | bool | None) else str(value)


def check_sizes(value: object, where: str = "processor settings") -> None:
    """Refuse sides, and numbers of tiles, that no tower of one size has."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_sizes(item, f"{where}, {key}")
    elif isinstance(value, list | tuple):
        for item in value:
            check_sizes(item, where)
    elif isinstance(value, int | float) and abs(value) > MOST:
        raise CheckpointError(
            f"{where}: {value} given, at most {MOST} expected. Check preprocessor_config.json."
        )


def by_channel(rows_NP: Tensor) -> Tensor:
    """Return rows whose values lay pixel by pixel channel by channel."""
    rows: Tensor = rows_NP.unflatten(1, (-1, 3)).transpose(1, 2).flatten(1)
    return rows


def whole(values: Mapping[str, Tensor], name: str) -> Tensor:
    """Return an output that a processor has to give, as floats where it is one."""
    output = values.get(name)
    if not isinstance(output, Tensor):
        raise InputError(
            f"the processor gave no '{name}', but {', '.join(values) or 'nothing'}. {ENCODE_ITEMS}"
        )
    return output.to(torch.float32) if output.is_floating_point() else output


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRule:
    """Images of `side` x `side` pixels, cut into patches for the rows of a call."""

    side: int
    patch: int

    @property
    def row_width(self) -> int:
        return 3 * self.patch**2


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureRule:
    """Pictures of which a processor makes tensors of one shape, a row of a call each, and the same integers.

    shapes     of the floats that a class takes, by its arguments
    constants  integers and masks that it takes
    """

    shapes: Mapping[str, tuple[int, ...]]
    constants: JsonObject
    side: int = 1
    patch: int = 1

    @property
    def row_width(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @classmethod
    def of(cls, values: Mapping[str, Tensor], arguments: Iterable[str]) -> PictureRule:
        """Return the rule of a picture of which a processor made these values."""
        # A manifest has its names sorted.
        taken = {name: whole(values, name) for name in sorted(arguments) if name in values}
        return cls(
            shapes={name: tuple(value.shape) for name, value in taken.items() if value.is_floating_point()},
            constants={
                name: value.tolist() for name, value in taken.items() if not value.is_floating_point()
            },
        )

    def arguments(self, row_W: Tensor) -> dict[str, Tensor]:
        """Return the arguments of a class of which a row holds the floats."""
        parts = row_W.split([math.prod(shape) for shape in self.shapes.values()])
        pairs = zip(self.shapes.items(), parts, strict=True)
        floats = {name: part.reshape(shape) for (name, shape), part in pairs}
        integers = encode(self.constants)
        return floats | {name: torch.tensor(value, device=row_W.device) for name, value in integers.items()}

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors that a class takes."""
        constants = encode(self.constants).items()
        return {**self.shapes, **{name: tuple(torch.tensor(value).shape) for name, value in constants}}

    def rows(self, kind: str, values: Mapping[str, Tensor]) -> Tensor:
        """Return a row for each picture of tensors that hold several, side by side along any axes."""
        sizes = self.sizes
        pieces = [_pieces(whole(values, name), shape) for name, shape in sizes.items()]
        is_cut = len({len(parts) for parts in pieces}) == 1
        pictures = (
            [dict(zip(sizes, parts, strict=True)) for parts in zip(*pieces, strict=True)]
            if is_cut
            else [values]
        )
        return torch.stack([self.row(kind, picture) for picture in pictures])

    def row(self, kind: str, values: Mapping[str, Tensor]) -> Tensor:
        """Return the row of a picture; refuse one of which other shapes or integers were made."""
        own = PictureRule.of(values, (*self.shapes, *self.constants))
        if encode(own) != encode(self):
            raise InputError(
                f"{kind}: the processor makes {_shown(own)} of it, but the bundle takes {_shown(self)}. "
                "Resize it to the shape of those, or crop it."
            )
        return torch.cat([whole(values, name).flatten() for name in self.shapes])


def _pieces(value: Tensor, shape: Sequence[int]) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = [value]
    for axis, size in enumerate(shape if value.ndim == len(shape) else ()):
        pieces = [part for piece in pieces for part in piece.split(size, axis)]
    return pieces


def _shown(rule: PictureRule) -> str:
    shapes = [f"{name} {list(shape)}" for name, shape in rule.shapes.items()]
    constants = (f"{name} {str(encode(value))[:60]}" for name, value in rule.constants.items())
    return ", ".join([*shapes, *constants])


def per_frame(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with bounds of one frame, where a processor counts several in them."""
    size = settings.get("size") or {}
    return {**settings, "size": {name: bound // IMAGE_FRAMES for name, bound in size.items()}}


def image_rule(processor: Processor, side: int, patch: int | None) -> ImageRule:
    """Return the rule of a tower of one size; refuse a processor that makes images of another."""
    patch = patch if patch and side % patch == 0 else side // next(n for n in PATCHES if side % n == 0)
    rule = ImageRule(side=side, patch=patch)
    if processor.is_named and processor.settings:
        try:
            to_images_of(
                rule, processor, Pixels(kind="image", frames=torch.zeros(1, side, side, 3, dtype=torch.uint8))
            )
        except InputError as error:
            raise CheckpointError(
                f"processor settings: {error} Check that preprocessor_config.json and config.json belong "
                "together."
            ) from error
    return rule


def to_images_of(rule: ImageRule, processor: Processor, pixels: Pixels) -> list[Tensor]:
    """Return images [B, 3, S, S] of a picture, or of each frame: the whole and its tiles, in their order."""
    check_sizes(processor.settings)
    batches = []
    for values in processor.images(pixels):
        images = whole(values, "pixel_values").flatten(0, -4)
        sides, mask = tuple(images.shape[-2:]), values.get("pixel_attention_mask")
        if sides != (rule.side, rule.side) or (mask is not None and not bool(mask.all())):
            raise InputError(
                f"{pixels.kind}: '{processor.name}' makes images of {sides[1]}x{sides[0]} pixels of it, but "
                f"the tower takes whole ones of {rule.side} x {rule.side}."
            )
        batches.append(images)
    return batches


def to_item(
    rule: ImageRule | PatchRule | PictureRule,
    form: str,
    processors: tuple[Processor, Processor | None],
    pixels: Pixels,
    *,
    by_area: bool = False,
) -> MediaItem:
    """Preprocess an image, or a video frame by frame; `by_area`: frames keep an area in their bounds."""
    image, frames = processors
    if isinstance(rule, PictureRule):
        rows = torch.stack([rule.row(pixels.kind, values) for values in image.images(pixels)])
        grid = (len(rows), 1, 1)
    elif isinstance(rule, ImageRule):
        processor = frames if frames is not None and pixels.kind == "video" else image
        images = to_images_of(rule, processor, pixels)
        if pixels.kind == "video" and any(len(frame) > 1 for frame in images):
            raise InputError(
                f"video: '{processor.name}' cuts each frame into tiles ({len(images[0])} images of the "
                f"first). Pass frames as images, one by one. {ENCODE_ITEMS}"
            )
        images_BCSS, across = torch.cat(images), rule.side // rule.patch
        rows = rows_of_image(images_BCSS, rule.patch)
        num_frames, tiles = (1, len(images_BCSS)) if pixels.kind == "image" else (len(images_BCSS), 1)
        grid = (num_frames, tiles * across, across)
    elif pixels.kind == "video" and by_area:
        return to_patches(rule, pixels)
    elif pixels.kind == "video" and form in OF_GRIDS:
        raise InputError(f"video: how '{image.name}' resizes videos is not known here. {ENCODE_ITEMS}")
    else:
        parts = [_of_grid(rule, form, values) for values in image.images(pixels)]
        rows, grid = torch.cat([part for part, _ in parts]), (len(parts), *parts[0][1])
    return MediaItem(kind=pixels.kind, patches=rows, grid=grid, seconds_per_grid=seconds_per_grid(pixels, 1))


def _of_grid(rule: PatchRule, form: str, values: Mapping[str, Tensor]) -> tuple[Tensor, tuple[int, int]]:
    pixels = whole(values, "pixel_values")
    if form in OF_GRIDS:
        _, rows, columns = whole(values, "image_grid_thw")[0].tolist()
        return cell_by_cell(pixels, rule.merge, rows, columns), (rows, columns)
    if form == "patches":
        mask, sides = whole(values, "pixel_attention_mask")[0].bool(), whole(values, "spatial_shapes")[0]
        rows, columns = sides.tolist()
        return by_channel(pixels[0][mask]), (rows, columns)
    return cut(pixels, rule), (pixels.shape[2] // rule.patch, pixels.shape[3] // rule.patch)


def cell_by_cell(pixels: Tensor, merge: int, rows: int, columns: int) -> Tensor:
    """Return rows of patches; images of patches, [N, 3, P, P], lie line by line."""
    if pixels.ndim < 3:
        return pixels
    cells = pixels.unflatten(0, (-1, rows // merge, merge, columns // merge, merge))
    rows_NP: Tensor = cells.transpose(2, 3).reshape(len(pixels), -1)
    return rows_NP


def longest_edge_rule(settings: Mapping[str, Any], *, patch: int, merge: int) -> PatchRule:
    """Return the rule of a processor that shrinks pictures to a longest edge."""
    size = settings.get("size") or {}
    longest = size.get("longest_edge") or size.get("height")
    if not longest:
        raise CheckpointError(
            f"processor settings: size {dict(size)} given, a longest_edge expected. "
            "Check preprocessor_config.json."
        )
    return _up_to(settings, patch, merge, (longest + patch * merge) ** 2)


def patch_count_rule(settings: Mapping[str, Any], *, patch: int) -> PatchRule:
    """Return the rule of a processor that makes up to so many patches of every picture."""
    if settings.get("patch_size", patch) != patch:
        raise CheckpointError(
            f"processor settings: patch_size {settings['patch_size']} given, but the tower has {patch}. "
            "Check that preprocessor_config.json and config.json are of one checkpoint."
        )
    most = int(settings.get("max_num_patches", MOST_PATCHES))
    return _up_to(settings, patch, 1, most * patch**2)


def _up_to(settings: Mapping[str, Any], patch: int, merge: int, most: int) -> PatchRule:
    mean, std, rescale, _ = normalisation({**settings, "resample": 3})
    bounds = ResizeRule(min_pixels=1, max_pixels=most)
    return PatchRule(
        patch=patch, merge=merge, temporal=1, mean=mean, std=std, rescale=rescale, resample=3,
        image=bounds, video=bounds,
    )  # fmt: skip


def to_images(patches_NP: Tensor, count: int, side: int, patch: int) -> Tensor:
    """Return rows of patches as images [count, 3, S, S]; torch.export takes an inferred count for not 1."""
    across = side // patch
    tiles = patches_NP.reshape(count, across, across, 3, patch, patch)
    images: Tensor = tiles.permute(0, 3, 1, 4, 2, 5).reshape(count, 3, side, side)
    return images
