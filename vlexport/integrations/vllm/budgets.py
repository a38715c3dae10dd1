"""Sizes of captured encoders as vLLM chooses them: token budgets, slices and patch grids of a capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vlexport.errors import InputError
from vlexport.runtime.packing import Batch, BudgetPlan
from vlexport.vision.static_shapes import doubling

PatchGrid = tuple[int, int]

# Slice grids, in patches, that are worth a capture of their own in addition to the encoder's full square.
USUAL_PATCH_GRIDS: tuple[PatchGrid, ...] = ((32, 32), (32, 64), (64, 32))


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetOptions:
    """Settings made by hand; everything left out follows from the range of tokens."""

    budgets: tuple[int, ...] = ()
    max_items: int | None = None
    max_frames: int | None = None

    def __post_init__(self) -> None:
        if any(budget < 1 for budget in self.budgets):
            raise InputError(f"budgets {list(self.budgets)}: expected token counts of 1 or more.")
        if self.max_items is not None and self.max_items < 1:
            raise InputError(f"max_items {self.max_items}: expected 1 or more media items per batch.")
        if self.max_frames is not None and self.max_frames < 0:
            raise InputError(f"max_frames {self.max_frames}: expected 0 or more frames per batch.")
        if self.budgets and self.max_items is not None and self.max_items > min(self.budgets):
            raise InputError(
                f"max_items {self.max_items} is more than the smallest budget {min(self.budgets)}: "
                f"every item has a token at least. Lower max_items or raise that budget."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoLimits:
    """Limits of a prompt: its videos, and the frames of a video."""

    videos: int
    frames: int


def plan_budgets(smallest: int, largest: int, options: BudgetOptions, video: VideoLimits) -> BudgetPlan:
    """Return budgets and batch limits for `smallest` to `largest` tokens; options win where given."""
    if not 1 <= smallest <= largest:
        raise InputError(f"tokens {smallest} to {largest}: expected 1 <= smallest <= largest.")
    if options.budgets:
        budgets = tuple(sorted(options.budgets))
    else:
        budgets = doubling(max(smallest, options.max_items or smallest), largest)
    max_items = options.max_items or min(largest // smallest, budgets[0])
    if video.videos == 0:
        max_frames = 0
    elif options.max_frames is not None:
        max_frames = options.max_frames
    else:
        max_frames = max_items * video.frames
    return BudgetPlan(budgets=budgets, max_items=max_items, max_frames=max_frames)


def unpack(batches: Sequence[Batch], outputs: Sequence[Tensor], tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """Return outputs per item in input order, copied from the front of each batch's rows."""
    by_item: dict[int, Tensor] = {}
    for batch, output in zip(batches, outputs, strict=True):
        start = 0
        for item in batch.items:
            by_item[item] = output[start : start + tokens[item]].clone()
            start += tokens[item]
        if start > output.shape[0]:
            raise InputError(
                f"{output.shape[0]} output rows given for items {list(batch.items)}, "
                f"which have {start} tokens; pass what the engine returned for exactly this batch."
            )
    return tuple(by_item[item] for item in range(len(tokens)))


def max_slices(budget: int, tokens_per_slice: int, max_images: int, slices_per_image: int) -> int:
    """Return the slices that a budget's capture holds; count every frame of a video as an image."""
    return max(1, min(budget // tokens_per_slice, max_images * slices_per_image))


def patch_grid_keys(side: int) -> tuple[PatchGrid, ...]:
    """Return slice grids to capture for a position table of `side` x `side` patches, which comes last."""
    fitting = tuple(grid for grid in USUAL_PATCH_GRIDS if max(grid) <= side)
    return tuple(dict.fromkeys((*fitting, (side, side))))


def choose_patch_grid(keys: Sequence[PatchGrid], sizes: Sequence[PatchGrid]) -> PatchGrid:
    """Return the first key that covers rows and columns of all slices, else the last."""
    rows, columns = (max((size[axis] for size in sizes), default=0) for axis in range(2))
    for key in keys:
        if rows <= key[0] and columns <= key[1]:
            return key
    return keys[-1]
