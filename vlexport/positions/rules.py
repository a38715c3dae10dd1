"""Inputs and results of M-RoPE positions: rules, options, placed media, tables.

Where versions of transformers differ, the later ones are followed: seconds per grid of an un-pruned video
keep their fraction until they are multiplied (5.18 and later; 5.17 cuts them to whole seconds first). Text
after a media item follows vLLM by default; `PositionOptions.resume="spatial"` follows transformers 5.

N prompt columns, R position rows (three for M-RoPE, one for linear positions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from vlexport.codec import is_number
from vlexport.errors import InputError
from vlexport.specs import RuleKind, check_choice

if TYPE_CHECKING:
    from torch import Tensor

Modality = Literal["image", "video"]
Resume = Literal["max_plus_one", "spatial"]
PrunedResume = Literal["reference", "max"]
PrunedTime = Literal["integer", "float"]
Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionOptions:
    """The points where implementations differ; the defaults agree with vLLM, pruned and un-pruned.

    resume         un-pruned text after a media item: `max_plus_one` goes on after the largest position of
                   the item, `spatial` after the larger side of its merged grid.
    pruned_resume  pruned text after a media item: `reference` goes on at the item's start plus the merged
                   width, `max` after the largest position that the item's kept tokens hold.
    pruned_time    seconds per grid of a pruned video: `integer` cuts them to whole seconds first, `float`
                   uses them as they are, like an un-pruned video.
    """

    resume: Resume = "max_plus_one"
    pruned_resume: PrunedResume = "reference"
    pruned_time: PrunedTime = "integer"

    def __post_init__(self) -> None:
        check_choice("resume", self.resume, get_args(Resume))
        check_choice("pruned_resume", self.pruned_resume, get_args(PrunedResume))
        check_choice("pruned_time", self.pruned_time, get_args(PrunedTime))

    @property
    def resumes_by_width(self) -> bool:
        """Whether text after a pruned item goes on at its start plus its merged width."""
        return self.pruned_resume == "reference"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameMarkers:
    """Token ids that a prompt with written-out time puts round each frame, and the video token itself."""

    vision_start: int
    vision_end: int
    video: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRule:
    """The rule by which a decoder numbers its prompt.

    kind  `time_scaled`: a video is one block whose first axis is scaled time. `time_as_text`: every frame
          is laid out like an image, time is written between the frames. `linear`: 0, 1, 2, ...
    """

    kind: RuleKind
    merge: int = 2
    tokens_per_second: float = 1
    markers: FrameMarkers | None = None
    options: PositionOptions = field(default_factory=PositionOptions)

    def __post_init__(self) -> None:
        check_choice("position rule", self.kind, get_args(RuleKind))
        if self.merge < 1:
            raise InputError(f"merge size {self.merge}: expected at least 1; take it from the vision config.")
        if not (math.isfinite(self.tokens_per_second) and self.tokens_per_second > 0):
            raise InputError(
                f"tokens_per_second {self.tokens_per_second}: expected a positive number; "
                f"take it from the vision config."
            )
        if self.kind == "time_as_text" and self.markers is None:
            raise InputError("time_as_text: no markers given; name the ids of vision start, end and video.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedMedia:
    """One image or video and its placeholder in the prompt.

    offset, length     the placeholder's columns. With written-out time a video's placeholder covers its
                       timestamps and markers too.
    grid               frames, rows and columns in patches, before merging.
    seconds_per_grid   time between two frames of the grid; needed when a video is pruned.
    frame_numbers      which frames of a longer grid these are; empty for all from the first on.
    """

    modality: Modality
    offset: int
    length: int
    grid: Grid
    seconds_per_grid: float | None = None
    frame_numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("modality", self.modality, get_args(Modality))
        check_placeholder(self.offset, self.length)
        if min(self.grid) < 1:
            raise InputError(f"grid {self.grid}: expected frames, rows and columns of 1 or more.")
        if self.modality == "image" and self.grid[0] != 1:
            raise InputError(
                f"image at {self.offset} has {self.grid[0]} frames; an image has 1. Pass it as a video."
            )
        seconds = self.seconds_per_grid
        if seconds is not None and not (is_number(seconds) and seconds >= 0):
            raise InputError(f"seconds_per_grid {seconds!r}: expected a finite number of 0 or more.")

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def numbers(self) -> Sequence[int]:
        return self.frame_numbers or range(self.grid[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPositions:
    """The table of a prompt; later tokens sit at n + `delta`, zero-dimensional on the table's device."""

    table_RN: Tensor
    delta: Tensor


def delta_of(table_RN: Tensor) -> Tensor:
    """Return largest position + 1 - length of the prompt; 0 for an empty prompt."""
    num_columns = table_RN.shape[1]
    if num_columns == 0:
        return table_RN.new_zeros(())
    return table_RN.amax() + (1 - num_columns)


def decode_positions(delta: Tensor, first: int, count: int = 1, rows: int = 3) -> Tensor:
    """Return positions (rows, count) of decoded tokens; `first` counts from the prompt's start."""
    import torch

    index = torch.arange(first, first + count, dtype=delta.dtype, device=delta.device)
    return (index + delta).expand(rows, count)


def merged_sides(grid: Grid, merge: int) -> tuple[int, int]:
    """Return rows and columns of the merged grid."""
    _, height, width = grid
    if height % merge or width % merge:
        raise InputError(
            f"grid {grid}: {height} x {width} patches do not divide by the merge size {merge}. "
            f"Resize to a multiple of patch size times merge size."
        )
    return height // merge, width // merge


def num_tokens(grid: Grid, merge: int) -> int:
    """Return tokens of a media item after the merger, before any pruning."""
    rows, columns = merged_sides(grid, merge)
    return grid[0] * rows * columns


def in_prompt_order(media: Sequence[PlacedMedia], num_columns: int) -> tuple[PlacedMedia, ...]:
    """Sort media by offset; placeholders that overlap or leave the prompt are refused."""
    ordered = tuple(sorted(media, key=lambda item: item.offset))
    check_placements([(item.offset, item.length) for item in ordered], num_columns)
    return ordered


def check_placeholder(offset: int, length: int) -> None:
    """Refuse a placeholder before the prompt, or without room."""
    if offset < 0 or length < 1:
        raise InputError(
            f"placeholder at {offset} of length {length}: expected an offset of 0 or more "
            f"and at least one token; check how the prompt was expanded."
        )


def check_placements(placements: Sequence[tuple[int, int]], num_columns: int) -> None:
    """Refuse placeholders (offset, length) that are empty, out of order, overlapping or beyond the prompt."""
    end = 0
    for offset, length in placements:
        if length < 1:
            raise InputError(f"placeholder at {offset} has length {length}; expected at least one token.")
        if offset < end:
            raise InputError(
                f"placeholder at {offset} begins before column {end}, where the one before it ends; "
                f"give disjoint placeholders in prompt order."
            )
        end = offset + length
    if end > num_columns:
        raise InputError(
            f"the last placeholder ends at {end}, the prompt has {num_columns} tokens; "
            f"pass the whole expanded prompt."
        )


def check_rate(rate: float) -> float:
    """Return the pruning rate if it is one: 0 <= rate < 1."""
    if not (is_number(rate) and 0.0 <= rate < 1.0):
        raise InputError(
            f"pruning rate {rate!r}: expected 0 <= rate < 1, the share of tokens to drop. "
            f"0 turns pruning off."
        )
    return rate
