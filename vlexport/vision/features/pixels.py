"""Pictures to rows of patches, as classes of transformers take them.

T frames, B images, S side, P patch side, N patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlexport.errors import CheckpointError, InputError
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.features.processors import ENCODE_ITEMS, Processor, by_channel, check_sizes, whole
from vlexport.vision.preprocess import (
    PatchRule,
    ResizeRule,
    cut,
    normalisation,
    seconds_per_grid,
    to_patches,
)

# Frames that an image counts for in bounds of a volume.
FRAMES = 2
# SigLIP 2's, where settings name none.
MOST_PATCHES = 256
# Patches along a side where a class has no patch size of its own.
PATCHES = (16, 8, 4, 2, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRule:
    """Images of `side` x `side` pixels, cut into patches for the rows of a call."""

    side: int
    patch: int

    @property
    def row_width(self) -> int:
        return 3 * self.patch**2


def per_frame(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with bounds of one frame, where a processor counts several in them."""
    size = settings.get("size") or {}
    return {**settings, "size": {name: each // FRAMES for name, each in size.items()}}


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
    found = []
    for made in processor.images(pixels):
        images = whole(made, "pixel_values").flatten(0, -4)
        sides, mask = tuple(images.shape[-2:]), made.get("pixel_attention_mask")
        if sides != (rule.side, rule.side) or (mask is not None and not bool(mask.all())):
            raise InputError(
                f"{pixels.kind}: '{processor.name}' makes images of {sides[1]}x{sides[0]} pixels of it, but "
                f"the tower takes whole ones of {rule.side} x {rule.side}."
            )
        found.append(images)
    return found


def to_item(
    rule: ImageRule | PatchRule,
    form: str,
    processors: tuple[Processor, Processor | None],
    pixels: Pixels,
    *,
    by_area: bool = False,
) -> MediaItem:
    """Preprocess an image, or a video frame by frame, as the checkpoint's processors do.

    processors  of images, and of videos where that makes one image of each frame
    by_area     frames of a video keep their area within bounds of their own, as images do
    """
    image, frames = processors
    if isinstance(rule, ImageRule):
        processor = frames if frames is not None and pixels.kind == "video" else image
        made = to_images_of(rule, processor, pixels)
        if pixels.kind == "video" and any(len(each) > 1 for each in made):
            raise InputError(
                f"video: '{processor.name}' cuts each frame into tiles ({len(made[0])} images of the first). "
                f"Pass frames as images, one by one. {ENCODE_ITEMS}"
            )
        images_BCSS, across = torch.cat(made), rule.side // rule.patch
        rows = to_rows(images_BCSS, rule.patch)
        num_frames, tiles = (1, len(images_BCSS)) if pixels.kind == "image" else (len(images_BCSS), 1)
        grid = (num_frames, tiles * across, across)
    elif pixels.kind == "video" and by_area:
        return to_patches(rule, pixels)
    elif pixels.kind == "video" and form == "grids":
        raise InputError(f"video: how '{image.name}' resizes videos is not known here. {ENCODE_ITEMS}")
    else:
        found = [_of_grid(rule, form, values) for values in image.images(pixels)]
        rows, grid = torch.cat([each for each, _ in found]), (len(found), *found[0][1])
    return MediaItem(kind=pixels.kind, patches=rows, grid=grid, seconds_per_grid=seconds_per_grid(pixels, 1))


def _of_grid(rule: PatchRule, form: str, values: Mapping[str, Tensor]) -> tuple[Tensor, tuple[int, int]]:
    """Return the rows of one frame, and its rows and columns of patches."""
    pixels = whole(values, "pixel_values")
    if form == "grids":
        _, rows, columns = whole(values, "image_grid_thw")[0].tolist()
        return pixels, (rows, columns)
    if form == "patches":
        mask, sides = whole(values, "pixel_attention_mask")[0].bool(), whole(values, "spatial_shapes")[0]
        rows, columns = sides.tolist()
        return by_channel(pixels[0][mask]), (rows, columns)
    return cut(pixels, rule), (pixels.shape[2] // rule.patch, pixels.shape[3] // rule.patch)


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
    """Return the rule of settings for pictures of at most so many pixels."""
    mean, std, rescale, _ = normalisation({**settings, "resample": 3})
    bounds = ResizeRule(min_pixels=1, max_pixels=most)
    return PatchRule(
        patch=patch, merge=merge, temporal=1, mean=mean, std=std, rescale=rescale, resample=3,
        image=bounds, video=bounds,
    )  # fmt: skip


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
