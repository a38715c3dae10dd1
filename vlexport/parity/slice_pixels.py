"""L0 of cutting images: sizes, cuts and the order of slices, and every pixel of them to one grey level.

Nothing here shares code with what it checks. T frames, H rows, W columns of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.parity.pixels import BICUBIC, LARGEST_STEP, MEAN_STEP, Clip, Preprocess, resized
from vlexport.parity.tables import Finding
from vlexport.specs import MediaItem

Size = tuple[int, int]
# Height and width of images, in sides of a slice: one slice and as it is, small, cut along either axis, in
# a grid, beyond the most cells.
SHAPES = ((1.0, 1.0), (0.4, 0.7), (0.6, 2.9), (3.1, 0.5), (1.7, 1.9), (2.2, 1.3), (0.8, 1.2), (3.2, 3.4))
EQUALLY_NEAR = (1.4, 1.4)
# So large that an image would be cut.
VIDEO = (1.3, 1.6)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRule:
    """How images are cut and normalised; `side` is that of a square slice in pixels."""

    patch: int
    side: int
    max_cells: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def check_slice_pixels(rule: CutRule, preprocess: Preprocess, seed: int, *, videos: bool) -> list[Finding]:
    """Images of many shapes, and a video, which is never cut."""
    found: dict[str, list[str]] = {"slice sizes": [], "slice pixels": [], "seconds": []}
    for number, clip in enumerate(_clips(rule, videos=videos)):
        pixels = clip.pixels(seed + number)
        item = preprocess(pixels)
        name = f"{clip.kind} {clip.frames}x{clip.height}x{clip.width}"
        cut = _cut(rule, (clip.height, clip.width)) if clip.kind == "image" else None
        whole = _about(rule, clip.height, clip.width, grow=cut is None)
        cell = _cell(rule, (clip.height, clip.width), cut) if cut else whole
        sizes = _said(item)
        wanted = [*[whole] * clip.frames, *[cell] * (math.prod(cut) if cut else 0)]
        patches = [(height // rule.patch, width // rule.patch) for height, width in wanted]
        if sizes != (patches, _grid(patches, cut)):
            found["slice sizes"].append(f"{name}: {sizes[0]}, not {patches}")
        elif not _agrees(rule, item.patches, _rows(rule, pixels.frames, whole, cut, cell)):
            found["slice pixels"].append(name)
        seconds = 1 / clip.rate if clip.rate else None
        if item.seconds_per_grid != seconds:
            found["seconds"].append(f"{name}: {item.seconds_per_grid}, not {seconds}")
    return [
        Finding(table=table, wrong=len(faults), first=faults[0] if faults else "")
        for table, faults in found.items()
    ]


def _clips(rule: CutRule, *, videos: bool) -> list[Clip]:
    images = [
        Clip(kind="image", frames=1, height=round(down * rule.side), width=round(across * rule.side))
        for down, across in (*SHAPES, EQUALLY_NEAR)
    ]
    height, width = (round(share * rule.side) for share in VIDEO)
    # A rate whose time is exact in float32.
    video = Clip(kind="video", frames=3, height=height, width=width, rate=2.0)
    return [*images, video] if videos else images


def _said(item: MediaItem) -> tuple[list[Size], tuple[int, int, int]]:
    return list(item.slices or (item.grid[1:],) * item.grid[0]), item.grid


def _grid(patches: Sequence[Size], cut: Size | None) -> tuple[int, int, int]:
    """Frames, rows and columns; those of all cells together where an image is cut."""
    rows, columns = patches[-1]
    return (1, cut[0] * rows, cut[1] * columns) if cut else (len(patches), rows, columns)


def _cut(rule: CutRule, size: Size) -> Size | None:
    """Rows and columns of about as many cells as slices fit in, with a shape nearest to the image's."""
    height, width = size
    wanted = min(math.ceil(height * width / rule.side**2), rule.max_cells)
    if wanted <= 1:
        return None
    allowed = range(max(2, wanted - 1), min(wanted + 1, rule.max_cells) + 1)
    cuts = [(rows, columns) for rows in range(1, 99) for columns in range(1, 99) if rows * columns in allowed]
    shape = math.log(width / height)
    # Of equally near ones the fewest cells, then the fewest columns.
    return min(cuts, key=lambda cut: (abs(shape - math.log(cut[1] / cut[0])), cut[0] * cut[1], cut[1]))


def _about(rule: CutRule, height: float, width: float, *, grow: bool) -> Size:
    """A slice of this shape with the area of a square one, sides of whole patches; small ones may stay."""
    if grow or height * width > rule.side**2:
        shape = width / height
        height = math.floor(rule.side / math.sqrt(shape))
        width = math.floor(height * shape)
    down, across = (max(1, round(length / rule.patch)) * rule.patch for length in (height, width))
    return down, across


def _cell(rule: CutRule, size: Size, cut: Size) -> Size:
    height, width = (
        max(1, round(length / parts)) * parts / parts for length, parts in zip(size, cut, strict=True)
    )
    return _about(rule, height, width, grow=True)


def _rows(rule: CutRule, frames_THWC: Tensor, whole: Size, cut: Size | None, cell: Size) -> Tensor:
    """Rows of grey levels: frames, or an overview and cells row by row; in each, patches in raster order."""
    values = frames_THWC.double()
    slices = list(_to(values, whole))
    if cut:
        (large_HWC,) = _to(values, (cut[0] * cell[0], cut[1] * cell[1]))
        slices += [
            large_HWC[down * cell[0] : (down + 1) * cell[0], across * cell[1] : (across + 1) * cell[1]]
            for down in range(cut[0])
            for across in range(cut[1])
        ]
    side = rule.patch
    return torch.stack(
        [
            torch.cat([part[top : top + side, left : left + side, channel].flatten() for channel in range(3)])
            for part in slices
            for top in range(0, part.shape[0], side)
            for left in range(0, part.shape[1], side)
        ]
    )


def _to(values_THWC: Tensor, size: Size) -> Tensor:
    return values_THWC if tuple(values_THWC.shape[1:3]) == size else resized(values_THWC, size, BICUBIC)


def _agrees(rule: CutRule, given: Tensor, levels: Tensor) -> bool:
    """Normalised values against grey levels, in steps of one level."""
    if given.shape != levels.shape:
        return False
    per_channel = given.shape[1] // 3
    mean, std = (torch.tensor(each).double().repeat_interleave(per_channel) for each in (rule.mean, rule.std))
    steps = (given.double() * std + mean) * 255 - levels
    return bool(steps.abs().max() <= LARGEST_STEP and steps.abs().mean() <= MEAN_STEP)
