"""Slices of any mix of images and videos as packed rows: orders, runs and positions of a call.

Rows of a group of slices lie together, equal groups side by side, so that slices of one length are runs
and nothing is padded. Host side; integers and float32 weights only.
S slices and G groups of a call, N patches, R runs, B table rows or columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
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
    """Rows and columns of each slice of an item; one slice per frame where it is not cut."""
    frames, rows, columns = item.grid
    return item.slices or ((rows, columns),) * frames


def num_groups(item: MediaItem) -> int:
    """How often an item is queried: once per group of frames, once per slice where no slice has a time."""
    return len(item.frame_groups) if _has_time(item) else len(slice_sizes(item))


def _has_time(item: MediaItem) -> bool:
    return any(frame != NO_TIME for group in item.frame_groups for frame in group)


def groups_of(media: Sequence[MediaItem]) -> list[list[Slice]]:
    """The slices of a call, group by group, as they came.

    Whether slices are grouped is decided item by item, so that no item depends on its neighbours.
    """
    found: list[list[Slice]] = []
    start = 0
    for item in media:
        sizes = slice_sizes(item)
        frames = [frame for group in item.frame_groups for frame in group] or [NO_TIME] * len(sizes)
        slices = []
        for (rows, columns), frame in zip(sizes, frames, strict=True):
            slices.append(Slice(start=start, rows=rows, columns=columns, frame=frame))
            start += rows * columns
        lengths = [len(group) for group in item.frame_groups] if _has_time(item) else [1] * len(sizes)
        taken = iter(slices)
        found.extend([next(taken) for _ in range(length)] for length in lengths)
    return found


def check_items(media: Sequence[MediaItem], row_width: int, *, timed: bool) -> None:
    """Refuse items whose slices, rows or frame numbers contradict each other; `timed` allows the latter."""
    if not media:
        raise InputError("no image or video given: at least one is expected.")
    for number, item in enumerate(media):
        sizes = slice_sizes(item)
        if not sizes or min(min(size) for size in sizes) < 1:
            raise InputError(
                f"item {number}: slices {list(map(list, sizes))} given, "
                "at least one expected, with rows and columns of 1 patch or more."
            )
        _check_rows(number, item, sum(rows * columns for rows, columns in sizes), row_width)
        if item.frame_groups:
            _check_frames(number, item, len(sizes), timed)


def _check_rows(number: int, item: MediaItem, rows: int, row_width: int) -> None:
    shape = list(item.patches.shape)
    if len(shape) != 2:
        raise InputError(
            f"item {number}: plain images of shape {shape} given, rows of patches [{rows}, {row_width}] "
            "expected. Preprocess the image, or cut its slices into rows with rows_of_image."
        )
    if shape != [rows, row_width]:
        raise InputError(
            f"item {number}: patches of shape {shape} given, [{rows}, {row_width}] expected for "
            f"{len(slice_sizes(item))} slices of {list(map(list, slice_sizes(item)))} patches."
        )


def _check_frames(number: int, item: MediaItem, slices: int, timed: bool) -> None:
    groups = [list(group) for group in item.frame_groups]
    if not timed:
        raise InputError(
            f"item {number}: frame numbers {groups} given, but this checkpoint has no place for them. "
            "Leave them out."
        )
    total = sum(map(len, groups))
    if total != slices or not all(groups):
        raise InputError(
            f"item {number}: {total} frame numbers in groups of {list(map(len, groups))} given, "
            f"{slices} expected, one per slice and at least one per group."
        )
    if min(map(min, groups)) < NO_TIME:
        raise InputError(
            f"item {number}: frame numbers {groups} given, 0 or more expected, or {NO_TIME} for none."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Rows of a call in the order of the blocks: per patch its slice and place, per group its runs."""

    order_N: Tensor
    runs_R2: Tensor
    group_keys_R2: Tensor
    group_inverse_G: Tensor
    cell_N2: Tensor
    sides_N2: Tensor
    frame_N: Tensor


def pack(groups: Sequence[Sequence[Slice]]) -> Packed:
    """Sort groups by their number of patches, then by the sizes of their slices; all tensors int64."""
    lengths_of = [[each.length for each in group] for group in groups]
    sorted_G = sorted(range(len(groups)), key=lambda at: (sum(lengths_of[at]), lengths_of[at]))
    slices = [each for at in sorted_G for each in groups[at]]
    fields_S4 = torch.tensor([(each.start, each.rows, each.columns, each.frame) for each in slices])
    lengths_S = fields_S4[:, 1] * fields_S4[:, 2]
    slice_N = torch.repeat_interleave(torch.arange(len(slices)), lengths_S)
    within_N = torch.arange(len(slice_N)) - (lengths_S.cumsum(0) - lengths_S)[slice_N]
    start_N, _, columns_N, frame_N = fields_S4[slice_N].unbind(-1)
    return Packed(
        order_N=start_N + within_N,
        runs_R2=_runs(lengths_S.tolist()),
        group_keys_R2=_runs([sum(lengths_of[at]) for at in sorted_G]),
        group_inverse_G=torch.tensor(sorted_G).argsort(),
        cell_N2=torch.stack([within_N // columns_N, within_N % columns_N], dim=-1),
        sides_N2=fields_S4[slice_N, 1:3],
        frame_N=frame_N,
    )


def _runs(lengths: Sequence[int]) -> Tensor:
    """(count, length) of each stretch of equal lengths."""
    return torch.tensor([(len(list(equal)), length) for length, equal in groupby(lengths)])


def bucket_ids(cell_N2: Tensor, sides_N2: Tensor, table_side: int) -> Tensor:
    """Rows of a square position table: each axis of a slice is stretched over the table's whole side.

    In float32 with these very boundaries, because a fraction may lie on one.
    """
    step = 1 / table_side
    boundaries_B = torch.arange(step, 1.0, step)
    bucket_N2 = torch.bucketize(cell_N2.float() / sides_N2.float(), boundaries_B, right=True)
    return bucket_N2[:, 0] * table_side + bucket_N2[:, 1]


def along_line(cell_N2: Tensor, sides_N2: Tensor) -> tuple[Tensor, Tensor]:
    """The same patches as slices of one row that holds them all."""
    place_N = cell_N2[:, 0] * sides_N2[:, 1] + cell_N2[:, 1]
    zero_N = torch.zeros_like(place_N)
    return torch.stack([zero_N, place_N], -1), torch.stack([zero_N + 1, sides_N2.prod(-1)], -1)


def resize_weights(packed: Packed, table_side: int, *, antialias: bool) -> tuple[Tensor, Tensor]:
    """What each row, and each column, of a square table adds to a patch when the table is resized.

    A bicubic resize is linear and works axis by axis, so its weights are those of resized unit vectors.
    """
    sides = packed.sides_N2.unique().tolist()
    stacked_B = torch.cat([_axis_weights(table_side, side, antialias) for side in sides])
    first = torch.zeros(sides[-1] + 1, dtype=torch.int64)
    first[sides] = torch.tensor(sides).cumsum(0) - torch.tensor(sides)
    place_N2 = first[packed.sides_N2] + packed.cell_N2
    return stacked_B[place_N2[:, 0]], stacked_B[place_N2[:, 1]]


def _axis_weights(table_side: int, side: int, antialias: bool) -> Tensor:
    # Along the last axis: with a last axis of 1, torch 2.13 resizes the wrong one when it antialiases.
    units_11BB, size = torch.eye(table_side)[None, None], (table_side, side)
    resized = F.interpolate(units_11BB, size, mode="bicubic", antialias=antialias, align_corners=False)
    return resized[0, 0].T


def frame_numbers(frames: int, frames_per_second: float) -> tuple[int, ...]:
    """The time of each frame in tenths of a second, as models with frame numbers count it."""
    if not frames_per_second > 0:
        raise InputError(f"frames per second: {frames_per_second} given, more than 0 expected.")
    return tuple(round(10 * frame / frames_per_second) for frame in range(frames))


def in_groups(numbers: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring frames that share their tokens, `size` at a time; the last group is the rest."""
    return tuple(tuple(numbers[start : start + size]) for start in range(0, len(numbers), size))
