"""Frames to images of the one size that a tower takes: resize, crop, normalise, cut into patches.

T frames, S side, P patch side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlexport.errors import CheckpointError, InputError
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.preprocess import (
    RESAMPLE_MODES,
    Levels,
    PatchRule,
    ResizeRule,
    channels_first,
    cut,
    normalisation,
    resample,
    seconds_per_grid,
    to_patches,
)

# What an image processor does to the size of a picture: makes it the tower's; keeps its area, or that of some
# frames, within bounds; keeps its longest edge within one; makes as many patches of it as may be.
ONE_SIZE, AREA, VOLUME, LONGEST_EDGE, COUNT = "one size", "area", "volume", "longest edge", "patches"
# The filter that only Pillow has, by its number there.
LANCZOS = 1
# SigLIP 2's, where settings name none; its search for a scale begins with these, and ends this near.
BILINEAR, MOST_PATCHES, SCALES, STEP = 2, 256, (1e-6, 100.0), 1e-5
# Frames that an image counts for in bounds of a volume.
FRAMES = 2
# Patches along a side where a class has no patch size of its own.
PATCHES = (16, 8, 4, 2, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRule:
    """Images of `side` x `side` pixels, cut into patches for the rows of a call.

    shortest  side that the shorter edge is resized to before the middle is cut out; None resizes both edges
    """

    side: int
    patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    resample: int
    shortest: int | None = None

    @property
    def row_width(self) -> int:
        return 3 * self.patch**2


def per_frame(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with bounds of one frame, where a processor counts several in them."""
    size = settings.get("size") or {}
    return {**settings, "size": {name: each // FRAMES for name, each in size.items()}}


def image_rule(settings: Mapping[str, Any], side: int, patch: int | None) -> ImageRule:
    """Return the rule of a processor's settings; refuse sizes other than the tower's."""
    size = settings.get("size") or {}
    crop = settings.get("crop_size") or {}
    size, crop = ({"height": each, "width": each} if isinstance(each, int) else each for each in (size, crop))
    cropped = bool(settings.get("do_center_crop", False)) and bool(crop)
    given = crop if cropped else size
    sides = {given.get("height", side), given.get("width", side)}
    shortest = size.get("shortest_edge") if cropped else None
    if sides != {side} or (cropped and shortest is None and {*size.values()} != {side}):
        raise CheckpointError(
            f"processor settings: size {dict(size)}, crop_size {dict(crop)} given, but the tower takes "
            f"images of {side} x {side}. Check that preprocessor_config.json and config.json belong together."
        )
    wanted = int(settings.get("resample", 3))
    mean, std, rescale, _ = normalisation({**settings, "resample": 3 if wanted == LANCZOS else wanted})
    patch = patch if patch and side % patch == 0 else side // next(n for n in PATCHES if side % n == 0)
    return ImageRule(
        side=side, patch=patch, mean=mean, std=std, rescale=rescale, resample=wanted, shortest=shortest
    )


def to_item(rule: ImageRule | PatchRule, processor: str, way: str | None, pixels: Pixels) -> MediaItem:
    """Preprocess as the checkpoint's processor does, if its way to resize is known."""
    if isinstance(rule, ImageRule) and way == ONE_SIZE:
        return to_image(rule, pixels)
    if isinstance(rule, PatchRule) and way == LONGEST_EDGE:
        return to_cells(rule, pixels)
    if isinstance(rule, PatchRule) and way == COUNT:
        return to_most_patches(rule, pixels)
    if isinstance(rule, PatchRule) and (way == AREA or (way == VOLUME and pixels.kind == "image")):
        cell, shorter = rule.patch * rule.merge, min(pixels.frames.shape[1:3])
        if way == VOLUME and shorter < cell:
            raise InputError(f"image: a side of {shorter} pixels given, {cell} or more expected.")
        return to_patches(rule, pixels)
    raise InputError(
        f"{pixels.kind}: how '{processor}' resizes is not known here. Preprocess with transformers, and pass "
        "patches and grid as a MediaItem to `Pipeline.encode_items`; docs/generic.md shows how."
    )


def to_image(rule: ImageRule, pixels: Pixels) -> MediaItem:
    """Resize, crop, normalise and cut one image, or every frame of a video; tiles are the caller's images."""
    frames_TCHW = channels_first(pixels.frames)
    height, width = frames_TCHW.shape[2:]
    rows = columns = rule.side
    if rule.shortest is not None:
        scale = rule.shortest / min(height, width)
        rows, columns = (max(rule.side, int(edge * scale)) for edge in (height, width))
    if (rows, columns) != (height, width):
        resize = (
            by_lanczos if rule.resample == LANCZOS else partial(resample, mode=RESAMPLE_MODES[rule.resample])
        )
        frames_TCHW = resize(frames_TCHW, rows, columns)
    top, left = (rows - rule.side) // 2, (columns - rule.side) // 2
    frames_TCHW = frames_TCHW[:, :, top : top + rule.side, left : left + rule.side]
    settings = (torch.tensor(values) / rule.rescale for values in (rule.mean, rule.std))
    mean, std = (tuple(values.tolist()) for values in settings)
    patches = to_rows(Levels(mean=mean, std=std).normalise(frames_TCHW), rule.patch)
    across = rule.side // rule.patch
    return MediaItem(
        kind=pixels.kind,
        patches=patches,
        grid=(len(frames_TCHW), across, across),
        seconds_per_grid=seconds_per_grid(pixels, 1),
    )


def by_lanczos(frames_TCHW: Tensor, rows: int, columns: int) -> Tensor:
    """Resize bytes with Pillow, whose filter torch does not have."""
    import numpy as np
    from PIL import Image

    frames = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in frames_TCHW.cpu()]
    resized = [np.asarray(each.resize((columns, rows), Image.Resampling.LANCZOS)) for each in frames]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


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
    return _up_to({"resample": BILINEAR, **settings}, patch, 1, most * patch**2)


def _up_to(settings: Mapping[str, Any], patch: int, merge: int, most: int) -> PatchRule:
    """Return the rule of settings for pictures of at most so many pixels."""
    mean, std, rescale, resampling = normalisation(settings)
    bounds = ResizeRule(min_pixels=1, max_pixels=most)
    return PatchRule(
        patch=patch, merge=merge, temporal=1, mean=mean, std=std, rescale=rescale, resample=resampling,
        image=bounds, video=bounds,
    )  # fmt: skip


def to_cells(rule: PatchRule, pixels: Pixels) -> MediaItem:
    """Shrink to the longest edge, and round both up to whole cells."""
    sides, cell = pixels.frames.shape[1:3], rule.patch * rule.merge
    ratio = max(1.0, max(sides) / (math.isqrt(rule.image.max_pixels) - cell))
    shrunk = (math.floor(edge / ratio) if ratio > 1 else edge for edge in sides)
    rows, columns = (max(1, -(-edge // cell)) * rule.merge for edge in shrunk)
    return _of_patches(rule, pixels, rows, columns)


def to_most_patches(rule: PatchRule, pixels: Pixels) -> MediaItem:
    """Scale to as many patches as may be, both sides rounded up to whole ones."""
    most, (low, high) = rule.image.max_pixels // rule.patch**2, SCALES

    def across(scale: float) -> list[int]:
        return [max(1, math.ceil(edge * scale / rule.patch)) for edge in pixels.frames.shape[1:3]]

    while high - low >= STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if math.prod(across(middle)) <= most else (low, middle)
    return _of_patches(rule, pixels, *across(low))


def _of_patches(rule: PatchRule, pixels: Pixels, rows: int, columns: int) -> MediaItem:
    """Resize to so many patches, normalise and cut."""
    frames_TCHW, sides = channels_first(pixels.frames), (rule.patch * rows, rule.patch * columns)
    if sides != tuple(frames_TCHW.shape[2:]):
        frames_TCHW = resample(frames_TCHW, *sides, RESAMPLE_MODES[rule.resample])
    return MediaItem(
        kind=pixels.kind,
        patches=cut(rule.levels.normalise(frames_TCHW), rule),
        grid=(len(frames_TCHW), rows, columns),
        seconds_per_grid=seconds_per_grid(pixels, 1),
    )


def to_rows(images_TCSS: Tensor, patch: int) -> Tensor:
    """Cut images into rows of patches, row by row; values lie channel by channel."""
    tiles = images_TCSS.unfold(2, patch, patch).unfold(3, patch, patch)
    found: Tensor = tiles.permute(0, 2, 3, 1, 4, 5).reshape(-1, images_TCSS.shape[1] * patch**2)
    return found


def to_images(patches_NP: Tensor, count: int, side: int, patch: int) -> Tensor:
    """Put rows of patches together to so many images, [count, 3, S, S].

    The count is explicit because torch.export holds inferred sizes to be other than 1.
    """
    across = side // patch
    tiles = patches_NP.reshape(count, across, across, 3, patch, patch)
    found: Tensor = tiles.permute(0, 3, 1, 4, 2, 5).reshape(count, 3, side, side)
    return found
