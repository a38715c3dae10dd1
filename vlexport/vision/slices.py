"""Images to slices: an overview of the whole and cells of a cut that keeps the image's shape.

Sizes follow the published processors: an overview and each cell have about `side` x `side` pixels, sides
are whole patches. The resize works on uint8 (antialiased bicubic), as in preprocess.py.
T frames, H rows, W columns, N patches, P values of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.errors import InputError
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.schemas import check_slices

Size = tuple[int, int]
"""Height and width in pixels, or rows and columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRule:
    """How images are cut; `side` is that of a square slice in pixels, `max_cells` leaves the overview out."""

    patch: int
    side: int
    max_cells: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def row_width(self) -> int:
        """Values in one row of patches."""
        return 3 * self.patch**2

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> SliceRule:
        """Read back what `dataclasses.asdict` wrote."""
        known = dict(values)
        return SliceRule(**{**known, "mean": tuple(known["mean"]), "std": tuple(known["std"])})


def best_cut(size: Size, side: int, max_cells: int) -> Size | None:
    """Rows and columns of cells with a ratio nearest to the image's, or None where it is not cut."""
    height, width = size
    wanted = min(math.ceil(height * width / side**2), max_cells)
    if wanted <= 1:
        return None
    counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= max_cells]
    cuts = [
        (count // columns, columns)
        for count in counts
        for columns in range(1, count + 1)
        if count % columns == 0
    ]
    wide = math.log(width / height)
    # min() takes the first of equals: fewer cells before more, fewer columns before more.
    return min(cuts, key=lambda cut: abs(wide - math.log(cut[1] / cut[0])))


def fitted(height: float, width: float, rule: SliceRule, *, enlarge: bool) -> Size:
    """The size of one slice: about `side` squared pixels, sides of whole patches, the ratio kept."""
    if enlarge or height * width > rule.side**2:
        ratio = width / height
        height = int(rule.side / math.sqrt(ratio))
        width = int(height * ratio)
    return _whole(height, rule.patch), _whole(width, rule.patch)


def _whole(length: float, unit: int) -> int:
    """The nearest multiple that is not zero; halves go to the even one, as published."""
    return max(round(length / unit) * unit, unit)


def cell_size(size: Size, cut: Size, rule: SliceRule) -> Size:
    """The size of each cell of a cut image."""
    height, width = (_whole(length, parts) / parts for length, parts in zip(size, cut, strict=True))
    return fitted(height, width, rule, enlarge=True)


def to_slices(rule: SliceRule, pixels: Pixels) -> MediaItem:
    """An image as its overview and cells, or a video as one slice per frame."""
    frames_TCHW = _channels_first(pixels.frames)
    size = (frames_TCHW.shape[2], frames_TCHW.shape[3])
    if pixels.kind == "image" and len(frames_TCHW) != 1:
        raise InputError(f"an image has one frame, {len(frames_TCHW)} given. Pass it as a video.")
    cut = best_cut(size, rule.side, rule.max_cells) if pixels.kind == "image" else None
    whole = fitted(*size, rule, enlarge=cut is None)
    parts = [_rows(rule, _resized(frames_TCHW, whole))]
    grid = (len(frames_TCHW), whole[0] // rule.patch, whole[1] // rule.patch)
    if cut is None:
        return MediaItem(kind=pixels.kind, patches=parts[0], grid=grid, seconds_per_grid=_seconds(pixels))
    cell = cell_size(size, cut, rule)
    refined_1CHW = _resized(frames_TCHW, (cell[0] * cut[0], cell[1] * cut[1]))
    cells = refined_1CHW.unflatten(3, (cut[1], -1)).unflatten(2, (cut[0], -1))
    parts.append(_rows(rule, cells.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)))
    rows, columns = cell[0] // rule.patch, cell[1] // rule.patch
    return MediaItem(
        kind=pixels.kind,
        patches=torch.cat(parts),
        grid=(1, cut[0] * rows, cut[1] * columns),
        slices=(grid[1:], *((rows, columns),) * (cut[0] * cut[1])),
    )


def cut_of(item: MediaItem) -> Size | None:
    """Rows and columns of cells of a cut image, which prompts lay out; None where nothing was cut."""
    if not item.slices:
        return None
    rows, columns = item.slices[-1]
    return item.grid[1] // rows, item.grid[2] // columns


def _channels_first(frames_THWC: Tensor) -> Tensor:
    if frames_THWC.dtype != torch.uint8 or frames_THWC.ndim != 4 or frames_THWC.shape[-1] != 3:
        raise InputError(
            f"frames: {frames_THWC.dtype} {list(frames_THWC.shape)} given, "
            "uint8 [frames, height, width, 3] expected."
        )
    if frames_THWC.numel() == 0:
        raise InputError(
            f"frames: {list(frames_THWC.shape)} given, at least one pixel of one frame expected."
        )
    return frames_THWC.permute(0, 3, 1, 2)


def _resized(frames_TCHW: Tensor, size: Size) -> Tensor:
    if tuple(frames_TCHW.shape[2:]) == size:
        return frames_TCHW
    return F.interpolate(frames_TCHW.contiguous(), size, mode="bicubic", antialias=True, align_corners=False)


def _rows(rule: SliceRule, frames_TCHW: Tensor) -> Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in (rule.mean, rule.std))
    return rows_of_image((frames_TCHW.float() / 255 - mean) / std, rule.patch)


def _seconds(pixels: Pixels) -> float | None:
    """Time between frames as float32, widened: the value that models are given."""
    if pixels.kind != "video" or pixels.frames_per_second is None:
        return None
    if not pixels.frames_per_second > 0:
        raise InputError(f"frames per second: {pixels.frames_per_second} given, more than 0 expected.")
    return float(torch.tensor(1 / pixels.frames_per_second, dtype=torch.float32))


def rows_of_image(frames_TCHW: Tensor, patch: int) -> Tensor:
    """Plain images of whole patches to rows [N, P] of (channel, y, x), raster order, frame by frame."""
    height, width = frames_TCHW.shape[2:]
    if height % patch or width % patch:
        raise InputError(f"an image of {width}x{height} pixels: multiples of {patch} expected.")
    split: Tensor = frames_TCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return split.permute(0, 2, 4, 1, 3, 5).reshape(-1, frames_TCHW.shape[1] * patch**2)


def image_of_rows(patches_NP: Tensor, rows: int, columns: int, patch: int) -> Tensor:
    """One slice as a plain image [C, H, W]; the inverse of `rows_of_image`."""
    split = patches_NP.reshape(rows, columns, -1, patch, patch)
    return split.permute(2, 0, 3, 1, 4).reshape(-1, rows * patch, columns * patch)


FrameGroups = tuple[tuple[int, ...], ...]
"""Frame numbers of the slices of one item, group by group."""


def items_of_strips(
    strips: Sequence[Tensor], sizes_S2: Tensor, counts_I: Tensor, frame_groups: Sequence[FrameGroups] = ()
) -> list[MediaItem]:
    """Items from the tensors of the published processors.

    A strip is one slice, (3, patch, patch * patches), its patches side by side in raster order; `sizes_S2`
    are rows and columns of each, `counts_I` the slices of each image, `frame_groups` one entry per image.
    """
    patch = strips[0].shape[1] if strips else 1
    check_slices(strips, sizes_S2, counts_I, patch)
    if len(frame_groups) not in (0, len(counts_I)):
        raise InputError(f"frame numbers of {len(frame_groups)} images given, {len(counts_I)} expected.")
    rows = [_rows_of_strip(strip, patch) for strip in strips]
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


def _rows_of_strip(strip: Tensor, patch: int) -> Tensor:
    split: Tensor = strip.unflatten(2, (-1, patch))
    return split.permute(2, 0, 1, 3).flatten(1)
