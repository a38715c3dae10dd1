"""Cutting of images: sizes, cuts, the order of slices, and every pixel of them to a grey level.

T frames, H rows, W columns of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from vlexport.recipes._minicpmv_reference import facts_of
from vlexport.recipes.minicpmv import best_cut

from tests.reference.slice_config import SLICED_CASES, CutRule, cut_facts, sliced_checkpoint
from tests.tiny_minicpmv import VERSIONS
from vlexport.specs import Pixels

Size = tuple[int, int]
# Height and width of images, in sides of a slice: one slice and as it is, small, cut along either axis, in
# a grid, beyond the most cells.
SHAPES = ((1.0, 1.0), (0.4, 0.7), (0.6, 2.9), (3.1, 0.5), (1.7, 1.9), (2.2, 1.3), (0.8, 1.2), (3.2, 3.4))
EQUALLY_NEAR = (1.4, 1.4)
# Two rounded passes of the resize: measured at most two grey levels, 0.004 on average.
LARGEST_STEP, MEAN_STEP = 2.01, 0.02
# So large that an image would be cut.
VIDEO = (1.3, 1.6)


def cases(side: int, *, videos: bool) -> Iterator[Pixels]:
    """Yield images of many shapes and a video, noise over slopes that differ by channel and frame."""
    sizes = [(round(down * side), round(across * side)) for down, across in (*SHAPES, EQUALLY_NEAR)]
    for seed, (height, width) in enumerate(sizes):
        yield Pixels(kind="image", frames=sloped(1, height, width, seed))
    if videos:
        height, width = (round(share * side) for share in VIDEO)
        yield Pixels(kind="video", frames=sloped(3, height, width, 99), frames_per_second=2.0)


def sloped(frames: int, height: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    down, across = torch.linspace(0, 120, height)[:, None, None], torch.linspace(60, 0, width)[:, None]
    level = down + across + 20.0 * torch.arange(3) + 7.0 * torch.arange(frames)[:, None, None, None]
    noise = torch.randint(0, 30, (frames, height, width, 3), generator=generator)
    return (level + noise).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["own names", "numbered"])
def test_slices_and_their_pixels_are_those_of_the_settings(version: str, name: str, tmp_path: Path) -> None:
    checkpoint, recipe, config = sliced_checkpoint(
        tmp_path, version, "preprocessor_config.json", SLICED_CASES[name]
    )
    facts = facts_of(checkpoint)
    rule = cut_facts(checkpoint, facts)
    for pixels in cases(rule.side, videos=facts.release.videos):
        item = recipe.preprocess(config, pixels)
        frames, height, width, _ = pixels.frames.shape
        cut = _cut(rule, (height, width)) if pixels.kind == "image" else None
        whole = _about(rule, height, width, grow=cut is None)
        cell = _cell(rule, (height, width), cut) if cut else whole
        wanted = [*[whole] * frames, *[cell] * (math.prod(cut) if cut else 0)]
        patches = [(down // rule.patch, across // rule.patch) for down, across in wanted]
        found = list(item.slices or (item.grid[1:],) * item.grid[0])
        assert (found, item.grid) == (patches, _grid(patches, cut)), (height, width)
        assert_pixels(rule, item.patches, _rows(rule, pixels.frames, whole, cut, cell))
        rate = pixels.frames_per_second
        assert item.seconds_per_grid == (1 / rate if rate else None)


@settings(deadline=None)
@example(237, 237, 9)  # as many cells as wanted and one more, which are the most
@given(st.integers(1, 1500), st.integers(1, 1500), st.integers(1, 12))
def test_cuts_are_the_published_ones_whatever_the_most_cells(height: int, width: int, most: int) -> None:
    rule = CutRule(patch=14, side=84, max_cells=most, mean=(), std=())
    assert best_cut((height, width), rule.side, most) == _cut(rule, (height, width))


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
    return values_THWC if tuple(values_THWC.shape[1:3]) == size else resized(values_THWC, size)


def assert_pixels(rule: CutRule, given: Tensor, levels: Tensor) -> None:
    assert given.shape == levels.shape
    per_channel = given.shape[1] // 3
    mean, std = (torch.tensor(each).double().repeat_interleave(per_channel) for each in (rule.mean, rule.std))
    steps = ((given.double() * std + mean) * 255 - levels).abs()
    assert float(steps.max()) <= LARGEST_STEP
    assert float(steps.mean()) <= MEAN_STEP


def resized(values_THWC: Tensor, sides: Size) -> Tensor:
    """Apply a separable bicubic filter stretched over the reduction, columns first, bytes after each pass."""
    across, down = weights(values_THWC.shape[2], sides[1]), weights(values_THWC.shape[1], sides[0])
    first = torch.einsum("thwc,xw->thxc", values_THWC, across).round().clamp(0, 255)
    return torch.einsum("thxc,yh->tyxc", first, down).round().clamp(0, 255)


def weights(size: int, target: int) -> Tensor:
    scale = size / target
    centres, places = ((torch.arange(count, dtype=torch.float64) + 0.5) for count in (target, size))
    distance = (places[None] - scale * centres[:, None]).abs() / max(scale, 1.0)
    near = (1.5 * distance - 2.5) * distance**2 + 1.0
    far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    rows = torch.where(distance < 2.0, torch.where(distance < 1.0, near, far), 0.0)
    return rows / rows.sum(-1, keepdim=True)
