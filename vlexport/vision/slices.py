"""Slices of media items: their sides, their groups, and their pixels as rows of patches.

Host side.   T frames, C channels, H rows, W columns, N patches, P values of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vlexport.errors import InputError
from vlexport.specs import MediaItem

NO_TIME = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One slice of a call: where its rows begin, its sides in patches, its frame number or `NO_TIME`."""

    start: int
    rows: int
    columns: int
    frame: int

    @property
    def length(self) -> int:
        return self.rows * self.columns


def slice_sizes(item: MediaItem) -> tuple[tuple[int, int], ...]:
    """Return rows and columns of each slice of an item; one slice per frame where it is not cut."""
    frames, rows, columns = item.grid
    return item.slices or ((rows, columns),) * frames


def groups_of(media: Sequence[MediaItem]) -> list[list[Slice]]:
    """Return the slices of a call, group by group, as they came; no item depends on its neighbours."""
    groups: list[list[Slice]] = []
    start = 0
    for item in media:
        sizes = slice_sizes(item)
        frames = [frame for group in item.frame_groups for frame in group] or [NO_TIME] * len(sizes)
        slices = []
        for (rows, columns), frame in zip(sizes, frames, strict=True):
            slices.append(Slice(start=start, rows=rows, columns=columns, frame=frame))
            start += rows * columns
        has_time = any(frame != NO_TIME for frame in frames)
        lengths = [len(group) for group in item.frame_groups] if has_time else [1] * len(sizes)
        taken = iter(slices)
        groups.extend([next(taken) for _ in range(length)] for length in lengths)
    return groups


def rows_of_image(frames_TCHW: Tensor, patch: int) -> Tensor:
    """Cut plain images of whole patches into rows [N, P] of (channel, y, x), raster order, frame by frame."""
    height, width = frames_TCHW.shape[2:]
    if height % patch or width % patch:
        raise InputError(f"an image of {width}x{height} pixels: multiples of {patch} expected.")
    split: Tensor = frames_TCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return split.permute(0, 2, 4, 1, 3, 5).reshape(-1, frames_TCHW.shape[1] * patch**2)


def image_of_rows(patches_NP: Tensor, rows: int, columns: int, patch: int) -> Tensor:
    """Return one slice as a plain image [C, H, W]; the inverse of `rows_of_image`."""
    split = patches_NP.reshape(rows, columns, -1, patch, patch)
    return split.permute(2, 0, 3, 1, 4).reshape(-1, rows * patch, columns * patch)
