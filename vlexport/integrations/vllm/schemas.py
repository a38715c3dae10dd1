"""Inputs of encoders as processors give them: names and shapes of fields, sizes that must agree, and items.

Shapes are checked against a `Schema`; that slices fit their sizes is checked by `check_slices`, on values.
`media_items` returns what a pipeline encodes, `encoded_items` what it puts into prompts.
I items, S slices, G grids, P patches, K tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import Grid
from vlexport.runtime.outputs import Encoded
from vlexport.specs import MediaItem


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field: a number in `shape` must match, a name must mean the same size wherever it occurs.

    shape     None for a list of plain values, one per item, that is passed on unread.
    free      names that may differ between the tensors of a list and are never bound.
    optional  whether the field may be missing or None.
    """

    name: str
    shape: tuple[int | str, ...] | None
    free: frozenset[str] = frozenset()
    optional: bool = False

    def __str__(self) -> str:
        return "a list" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The fields of one kind of input; `name` is used in its messages."""

    name: str
    fields: tuple[Field, ...]

    def check(self, given: Mapping[str, object], sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        """Refuse fields that are missing, unknown or misshaped; returns the size behind every name.

        A list of tensors counts as their stack. `sizes` holds what is known before, such as the width.
        """
        known = [field.name for field in self.fields]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InputError(
                f"{self.name}: unknown fields {', '.join(unknown)}; expected {', '.join(sorted(known))}."
            )
        bound = {name: (size, "the caller's sizes") for name, size in (sizes or {}).items()}
        for field in self.fields:
            value = given.get(field.name)
            if value is not None:
                _bind(field, f"{self.name}, {field.name}", _shape_of(self, field, value), bound)
            elif not field.optional:
                present = sorted(name for name in given if given[name] is not None)
                raise InputError(
                    f"{self.name}: {field.name} is missing; expected {field}. "
                    f"Given: {', '.join(present) or 'nothing'}."
                )
        return {name: size for name, (size, _) in bound.items()}


def _shape_of(schema: Schema, field: Field, value: object) -> tuple[int, ...] | None:
    """Return the shape of a tensor or of the stack of a list; None for a list of plain values."""
    where = f"{schema.name}, {field.name}"
    if isinstance(value, Tensor) and field.shape is not None:
        return tuple(value.shape)
    if not isinstance(value, list | tuple):
        wanted = "a list with one entry per item" if field.shape is None else f"a tensor or a list, {field},"
        raise InputError(f"{where}: {type(value).__name__} given, {wanted} expected.")
    if field.shape is None:
        return None
    if not value:
        raise InputError(f"{where}: an empty list given, {field} expected. Leave the whole input out.")
    for index, element in enumerate(value):
        if not isinstance(element, Tensor):
            raise InputError(f"{where}: element {index} is {type(element).__name__}, a tensor expected.")
        if not _agree(field.shape[1:], field.free, value[0].shape, element.shape):
            raise InputError(
                f"{where}: elements 0 and {index} are inconsistent, shapes {list(value[0].shape)} and "
                f"{list(element.shape)}; {field} expected"
                f"{', where ' + ', '.join(sorted(field.free)) + ' may differ' if field.free else ''}."
            )
    return (len(value), *value[0].shape)


def _agree(
    dims: tuple[int | str, ...], free: frozenset[str], first: Sequence[int], other: Sequence[int]
) -> bool:
    if len(first) != len(other):
        return False
    fixed = [index >= len(dims) or dims[index] not in free for index in range(len(first))]
    return all(a == b for a, b, is_fixed in zip(first, other, fixed, strict=True) if is_fixed)


def _bind(field: Field, where: str, shape: tuple[int, ...] | None, bound: dict[str, tuple[int, str]]) -> None:
    if shape is None or field.shape is None:
        return
    if len(shape) != len(field.shape):
        raise InputError(
            f"{where}: {len(shape)} dimensions given ({list(shape)}), {len(field.shape)} expected ({field})."
        )
    for axis, (size, dim) in enumerate(zip(shape, field.shape, strict=True)):
        if isinstance(dim, int):
            if size != dim:
                raise InputError(
                    f"{where}: dimension {axis} of {list(shape)} is {size}, {dim} expected ({field})."
                )
        elif dim not in field.free:
            wanted, source = bound.setdefault(dim, (size, field.name))
            if size != wanted:
                raise InputError(
                    f"{where}: dimension {axis} of {list(shape)} makes {dim} {size}, but it is {wanted} in "
                    f"{source}; expected {field}."
                )


IMAGE_GRIDS = Field(name="image_grid_thw", shape=("images", 3))
VIDEO_GRIDS = Field(name="video_grid_thw", shape=("videos", 3))
VIDEO_TIMES = (
    Field(name="second_per_grid_ts", shape=("videos",), optional=True),
    Field(name="timestamps", shape=None, optional=True),
)
SLICE_SIZES = (
    Field(name="tgt_sizes", shape=("slices", 2)),
    Field(name="num_slices", shape=("images",)),
    Field(name="temporal_ids", shape=None, optional=True),
)

PATCH_IMAGES = Schema(
    name="images as patches",
    fields=(Field(name="pixel_values", shape=("patches", "patch_values")), IMAGE_GRIDS),
)
EMBEDDED_IMAGES = Schema(
    name="embedded images", fields=(Field(name="image_embeds", shape=("tokens", "width")), IMAGE_GRIDS)
)
PATCH_VIDEOS = Schema(
    name="videos as patches",
    fields=(Field(name="pixel_values_videos", shape=("patches", "patch_values")), VIDEO_GRIDS, *VIDEO_TIMES),
)
EMBEDDED_VIDEOS = Schema(
    name="embedded videos",
    fields=(Field(name="video_embeds", shape=("tokens", "width")), VIDEO_GRIDS, *VIDEO_TIMES),
)
# A slice is (channels, patch, patch * number of patches), its patches side by side.
SLICED_IMAGES = Schema(
    name="images as slices",
    fields=(
        Field(
            name="pixel_values",
            shape=("slices", "channels", "slice_height", "slice_width"),
            free=frozenset({"slice_height", "slice_width"}),
        ),
        *SLICE_SIZES,
    ),
)
EMBEDDED_SLICES = Schema(
    name="embedded slices",
    fields=(Field(name="image_embeds", shape=("images", "tokens", "width"), free=frozenset({"tokens"})),),
)


def check_slices(slices: Sequence[Tensor], sizes_S2: Tensor, counts_I: Tensor, patch: int) -> None:
    """Refuse slices that are not (channels, patch, patch * rows * columns), or not as many as images have."""
    total = int(counts_I.sum())
    if not len(slices) == len(sizes_S2) == total:
        raise InputError(
            f"{len(slices)} slices and {len(sizes_S2)} sizes given, the images count "
            f"{' + '.join(map(str, counts_I.tolist()))} = {total} slices; pass all three of the same images."
        )
    for index, (pixels, (rows, columns)) in enumerate(zip(slices, sizes_S2.tolist(), strict=True)):
        if tuple(pixels.shape[1:]) != (patch, patch * rows * columns):
            raise InputError(
                f"slice {index}: shape {list(pixels.shape)} given, [channels, {patch}, "
                f"{patch * rows * columns}] expected for {rows} x {columns} patches of {patch}. "
                f"Cut plain images into patches, side by side in raster order, first."
            )


def media_items(given: Mapping[str, Any]) -> list[MediaItem]:
    """Return the images, then the videos, of one output of a processor."""
    if "tgt_sizes" in given:
        SLICED_IMAGES.check(given)
        strips = [*given["pixel_values"]]
        return items_of_strips(
            strips, given["tgt_sizes"], given["num_slices"], given.get("temporal_ids") or ()
        )
    found = []
    for kind, part in _by_kind(given, PATCH_IMAGES, PATCH_VIDEOS).items():
        pixels, grids = part["pixel_values" if kind == "image" else "pixel_values_videos"], _grids(part, kind)
        rows = _cut(pixels, [math.prod(grid) for grid in grids], kind)
        for patches, grid, times in zip(rows, grids, _times(part, len(grids)), strict=True):
            found.append(MediaItem(kind=kind, patches=patches, grid=grid, **times))
    return found


def encoded_items(given: Mapping[str, Any], merge: int) -> list[Encoded]:
    """Return the same of embeddings that were made elsewhere; `merge` is the side of a cell in patches."""
    found = []
    for kind, part in _by_kind(given, EMBEDDED_IMAGES, EMBEDDED_VIDEOS).items():
        grids = _grids(part, kind)
        rows = _cut(part[f"{kind}_embeds"], [math.prod(grid) // merge**2 for grid in grids], kind)
        for embeds, grid, times in zip(rows, grids, _times(part, len(grids)), strict=True):
            found.append(Encoded(kind=kind, embeds=embeds, grid=grid, layers={}, **times))
    return found


def _by_kind(given: Mapping[str, Any], images: Schema, videos: Schema) -> dict[str, dict[str, Any]]:
    """Split fields by the kind of their items, and check both."""
    named = {field.name for field in images.fields}
    parts = {
        "image": {name: value for name, value in given.items() if name in named},
        "video": {name: value for name, value in given.items() if name not in named},
    }
    for schema, part in zip((images, videos), parts.values(), strict=True):
        if part:
            schema.check(part)
    return {kind: part for kind, part in parts.items() if part}


def _grids(part: Mapping[str, Any], kind: str) -> list[Grid]:
    return [(frames, rows, columns) for frames, rows, columns in part[f"{kind}_grid_thw"].tolist()]


def _cut(rows_PD: Tensor, counts: Sequence[int], kind: str) -> tuple[Tensor, ...]:
    if sum(counts) != len(rows_PD):
        raise InputError(
            f"{kind}s: {len(rows_PD)} rows given, {sum(counts)} expected for their grids. "
            "Pass both of the same items."
        )
    parts: tuple[Tensor, ...] = rows_PD.split(list(counts))
    return parts


def _times(part: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return what is known of the time of each item."""
    steps, stamps = part.get("second_per_grid_ts"), part.get("timestamps")
    return [
        {
            "seconds_per_grid": None if steps is None else float(steps[at]),
            "frame_seconds": () if stamps is None else tuple(map(float, stamps[at])),
        }
        for at in range(count)
    ]


FrameGroups = tuple[tuple[int, ...], ...]
"""Frame numbers of the slices of one item, group by group."""


def items_of_strips(
    strips: Sequence[Tensor], sizes_S2: Tensor, counts_I: Tensor, frame_groups: Sequence[FrameGroups] = ()
) -> list[MediaItem]:
    """Return items from the tensors of the published processors.

    A strip is one slice, (3, patch, patch * patches), its patches side by side in raster order; `sizes_S2`
    are rows and columns of each, `counts_I` the slices of each image, `frame_groups` one entry per image.
    """
    patch = strips[0].shape[1] if strips else 1
    check_slices(strips, sizes_S2, counts_I, patch)
    if len(frame_groups) not in (0, len(counts_I)):
        raise InputError(f"frame numbers of {len(frame_groups)} images given, {len(counts_I)} expected.")
    cut = (strip.unflatten(2, (-1, patch)) for strip in strips)
    rows = [split.permute(2, 0, 1, 3).flatten(1) for split in cut]
    items, start = [], 0
    for index, count in enumerate(counts_I.tolist()):
        sizes = tuple((int(down), int(across)) for down, across in sizes_S2[start : start + count].tolist())
        items.append(
            MediaItem(
                kind="image",
                patches=torch.cat(rows[start : start + count]),
                grid=(count, *sizes[-1]),
                slices=sizes,
                frame_groups=frame_groups[index] if frame_groups else (),
            )
        )
        start += count
    return items
