"""Choosing K of a video's tokens by score, on the device, with K known on the host.

T frames, N tokens per frame, R = T * N rows, D width, K kept rows.

A selector gives the number of tokens that survive and a score of each; `BestRows` keeps the K best in order.
Nothing is read back from the device and no shape depends on data, so the same program runs eagerly, under
torch.compile, inside a captured graph, and as a package (compile.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import Grid, check_rate, merged_sides

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 2**16

# Embeddings (T, N, D) and `share_K` to the kept rows (K, D) and their indices (K), int64 and ascending.
# share_K holds the share of tokens to keep, 1 - rate, once per kept token: its length is K.
Select = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


C = TypeVar("C")


class Selector(ABC):
    """A rule that drops tokens and leaves the others where they are.

    kinds           of media that it prunes; others stay whole
    most_packaged   tokens of a frame that a package takes at most; None for any number
    by_place        whether a row's score depends on rows of other frames at its place
    sums_are_exact  whether a compiler may fuse multiplications into additions without changing a score
    """

    kinds: ClassVar[tuple[str, ...]] = ("video",)
    most_packaged: ClassVar[int | None] = None
    by_place: ClassVar[bool] = True

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def sums_are_exact(self) -> bool:
        return False

    @abstractmethod
    def least_kept(self, tokens_per_frame: C, frames: C) -> C | int:
        """Return the count below which pruning never goes: one frame's tokens, or one token a frame."""

    def retained_count(self, tokens_per_frame: int, frames: int, rate: float) -> int:
        """Return how many tokens survive pruning."""
        check_sizes(tokens_per_frame, frames)
        # Plain double arithmetic in this order: whatever sized the prompt's placeholder counts the same way.
        share = 1.0 - check_rate(rate)
        least = self.least_kept(tokens_per_frame, frames)
        return max(least, math.trunc(float(tokens_per_frame * frames) * share))

    @abstractmethod
    def scores(self, embeds_TND: Tensor, share: Tensor, num_kept: int = 0) -> Tensor:
        """Return float32 (T, N), no NaN: the higher is kept, of equals the one with the lower index."""

    def portable(self) -> Selector:
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The kept tokens of a video: rows (K, D), and their places among all rows (K, int64, ascending)."""

    embeds: Tensor
    kept: Tensor


class BestRows(torch.nn.Module):
    """`Select` of one selector, as a module without weights: what is compiled, exported and packaged."""

    def __init__(self, selector: Selector) -> None:
        super().__init__()
        self.selector = selector

    def forward(self, embeds_TND: Tensor, share_K: Tensor) -> tuple[Tensor, Tensor]:
        scores_TN = self.selector.scores(embeds_TND, share_K[0], share_K.shape[0])
        kept_K = best(scores_TN.flatten(), share_K.shape[0])
        return embeds_TND.flatten(0, 1).index_select(0, kept_K), kept_K


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A selector and the form it runs in: eager, compiled, or loaded from a package."""

    selector: Selector
    run: Select


def eager(selector: Selector) -> Selection:
    """Return the selector as it runs operation by operation."""
    return Selection(selector=selector, run=BestRows(selector))


def prune_by(
    selection: Selection, embeds_RD: Tensor, grid_thw: Grid, merge: int, rate: float | None
) -> Pruned:
    """Prune one video. Without a rate, or with 0, the embeddings come back as they are, not copied."""
    frames, per_frame = check_embeds(embeds_RD, grid_thw, merge)
    rate = check_rate(rate or 0.0)
    num_rows, num_kept = frames * per_frame, selection.selector.retained_count(per_frame, frames, rate)
    if rate == 0 or num_kept == num_rows:
        return Pruned(embeds=embeds_RD, kept=torch.arange(num_rows, device=embeds_RD.device))
    share_K = torch.full((num_kept,), 1.0 - rate, dtype=torch.float32, device=embeds_RD.device)
    rows_KD, kept_K = selection.run(embeds_RD.unflatten(0, (frames, per_frame)), share_K)
    return Pruned(embeds=rows_KD, kept=kept_K)


def prune_part(selector: Selector, part: Pruned, grid_thw: Grid, merge: int, rate: float) -> Pruned:
    """Prune a video of which the tower had some cells; the rate is of all of them.

    Where places count, a cell that is not there is as the last one of its place, or zero before the first
    one, and is never kept.
    """
    embeds_KD, cells_K = part.embeds, part.kept
    rows, columns = merged_sides(grid_thw, merge)
    frames, per_frame = grid_thw[0], rows * columns
    num_kept = min(len(cells_K), selector.retained_count(per_frame, frames, check_rate(rate)))
    if num_kept == len(cells_K):
        return part
    share = torch.tensor(1.0 - rate, dtype=torch.float32, device=embeds_KD.device)
    if not selector.by_place:
        rows_K = best(selector.scores(embeds_KD[None], share, num_kept).flatten(), num_kept)
        return Pruned(embeds=embeds_KD[rows_K], kept=cells_K[rows_K])
    numbers_K = torch.arange(1, len(cells_K) + 1, device=cells_K.device)
    place_R = cells_K.new_zeros(frames * per_frame).index_copy(0, cells_K, numbers_K)
    last_R = place_R.view(frames, per_frame).cummax(0).values.flatten()
    padded = torch.cat([torch.zeros_like(embeds_KD[:1]), embeds_KD])
    scores_TN = selector.scores(padded[last_R].unflatten(0, (frames, per_frame)), share, num_kept)
    kept_K = best(torch.where(place_R > 0, scores_TN.flatten(), -torch.inf), num_kept)
    return Pruned(embeds=embeds_KD.index_select(0, place_R[kept_K] - 1), kept=kept_K)


def best(scores_R: Tensor, num_kept: int) -> Tensor:
    """Return indices of the highest scores, ascending; equal ones at the cut from the lowest index on.

    The rule of a stable descending sort without the sort: everything above the K-th score, then the first
    of those equal to it.
    """
    cut = scores_R.topk(num_kept, sorted=False).values.amin(0)
    above_R, level_R = scores_R > cut, scores_R == cut
    room = num_kept - above_R.sum()
    kept_R = above_R | (level_R & (level_R.to(torch.int64).cumsum(0) <= room))
    slot_R = torch.where(kept_R, kept_R.to(torch.int64).cumsum(0) - 1, num_kept)
    index_R = torch.arange(scores_R.shape[0], device=scores_R.device)
    # Dropped tokens all land in one slot too many.
    return index_R.new_zeros(num_kept + 1).scatter(0, slot_R, index_R)[:num_kept]


def ranks(scores_TN: Tensor) -> Tensor:
    """Return the place of each score in descending order, from 0; of equals the first one comes first."""
    count = scores_TN.shape[1]
    place_N = torch.arange(count, device=scores_TN.device)
    order_TN = (scores_TN * count - place_N).topk(count).indices
    return torch.zeros_like(order_TN).scatter(1, order_TN, place_N.expand_as(order_TN))


def check_sizes(tokens_per_frame: int, frames: int) -> None:
    """Refuse a video without tokens."""
    if tokens_per_frame < 1 or frames < 1:
        raise InputError(
            f"{frames} frames of {tokens_per_frame} tokens: expected at least one of each to prune."
        )


def check_embeds(embeds_RD: Tensor, grid_thw: Grid, merge: int) -> tuple[int, int]:
    """Return frames and tokens per frame of a video, when embeddings and grid agree."""
    if embeds_RD.ndim != 2:
        raise InputError(
            f"embeddings: shape {list(embeds_RD.shape)} given, [tokens, width] expected. "
            f"Prune one video at a time, without a batch axis."
        )
    if embeds_RD.dtype not in DTYPES:
        raise InputError(
            f"embeddings: {embeds_RD.dtype} given; expected the tower's own output in torch.float32, "
            f"torch.bfloat16 or torch.float16."
        )
    if not 1 <= embeds_RD.shape[1] <= MAX_WIDTH:
        raise InputError(f"embeddings: width {embeds_RD.shape[1]} given, 1 to {MAX_WIDTH} expected.")
    if min(grid_thw) < 1 or merge < 1:
        raise InputError(
            f"grid {grid_thw} with merge size {merge}: expected frames, rows and columns in patches, "
            f"each at least 1, and a merge size of at least 1."
        )
    rows, columns = merged_sides(grid_thw, merge)
    frames, per_frame = grid_thw[0], rows * columns
    if embeds_RD.shape[0] != frames * per_frame:
        raise InputError(
            f"embeddings: {embeds_RD.shape[0]} rows given, {frames * per_frame} expected for grid "
            f"{grid_thw} with merge size {merge} ({frames} frames of {per_frame} tokens). "
            f"Pass the video's own grid, in patches, and its tokens before any pruning."
        )
    return frames, per_frame
