"""Data-parallel encoding: items of each rank, their inputs, and results in input order again.

Pure functions for data-parallel encoders: no process group is touched here, the caller gathers.
I items, R ranks, P patch rows of a call, L patch rows of one rank, K tokens of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.errors import InputError

Grid = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Items by rank: `order` lists the ranks' items one rank after another, `loads` adds up their sizes."""

    order: tuple[int, ...]
    counts: tuple[int, ...]
    loads: tuple[int, ...]

    def items_of(self, rank: int) -> tuple[int, ...]:
        first = sum(self.counts[:rank])
        return self.order[first : first + self.counts[rank]]


def balance(sizes: Sequence[int], num_ranks: int) -> Assignment:
    """Give the largest item first to the least loaded rank; ties keep input order, lower rank first."""
    if num_ranks < 1:
        raise InputError(f"{num_ranks} ranks given, at least 1 is expected.")
    items: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = loads.index(min(loads))
        items[rank].append(item)
        loads[rank] += sizes[item]
    return Assignment(
        order=tuple(item for group in items for item in group),
        counts=tuple(map(len, items)),
        loads=tuple(loads),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """A call of several media items spread over ranks.

    grids        per item (frames, rows, columns) or (rows, columns); the product is its number of patches.
    merge_area   patches per token.
    num_padded   token rows that every rank contributes to the gather; those beyond its own are padding.
    """

    grids: tuple[Grid, ...]
    merge_area: int
    assignment: Assignment
    num_padded: int

    def grids_of(self, rank: int) -> tuple[Grid, ...]:
        return tuple(self.grids[item] for item in self.assignment.items_of(rank))

    def patches_of(self, rank: int, patches_PC: Tensor) -> Tensor:
        sizes = [math.prod(grid) for grid in self.grids]
        if patches_PC.shape[0] != sum(sizes):
            raise InputError(
                f"{patches_PC.shape[0]} patch rows given, the grids {list(map(list, self.grids))} add up to "
                f"{sum(sizes)}; pass the patches of exactly these items."
            )
        per_item = patches_PC.split(sizes)
        return torch.cat([patches_PC[:0], *(per_item[item] for item in self.assignment.items_of(rank))])

    def pad(self, rank: int, tokens_KD: Tensor) -> Tensor:
        expected = self.assignment.loads[rank] // self.merge_area
        if tokens_KD.shape[0] != expected:
            raise InputError(
                f"rank {rank}: {tokens_KD.shape[0]} token rows given, its items have {expected}; "
                f"run the tower on what patches_of and grids_of return."
            )
        padding = tokens_KD.new_zeros((self.num_padded - expected, *tokens_KD.shape[1:]))
        return torch.cat([tokens_KD, padding])

    def restore(self, gathered: Tensor) -> tuple[Tensor, ...]:
        """Return tokens per item in input order, from all ranks' padded rows in rank order."""
        num_ranks = len(self.assignment.counts)
        if gathered.shape[0] != num_ranks * self.num_padded:
            raise InputError(
                f"{gathered.shape[0]} gathered rows given, {num_ranks} ranks give {self.num_padded} each; "
                f"gather what pad returns along the first dimension."
            )
        rows: list[Tensor] = []
        for rank, padded in enumerate(gathered.split(self.num_padded)):
            sizes = [math.prod(grid) // self.merge_area for grid in self.grids_of(rank)]
            rows += padded[: sum(sizes)].split(sizes)
        by_item = dict(zip(self.assignment.order, rows, strict=True))
        return tuple(by_item[item] for item in range(len(self.grids)))


def shard_items(grids: Sequence[Sequence[int]], num_ranks: int, merge_area: int) -> Shards:
    """Spread media items over ranks by their patches; `merge_area` is merge rows times merge columns."""
    if not grids:
        raise InputError(f"no media items to spread over {num_ranks} ranks; at least one is expected.")
    rows = tuple(tuple(grid) for grid in grids)
    for index, grid in enumerate(rows):
        size = math.prod(grid)
        if len(grid) not in (2, 3) or min(grid) < 1 or size % merge_area:
            raise InputError(
                f"grid {list(grid)} of item {index}: expected [frames, rows, columns] or [rows, columns] "
                f"of 1 or more, with a number of patches that {merge_area} (patches per token) divides."
            )
    assignment = balance([math.prod(grid) for grid in rows], num_ranks)
    return Shards(
        grids=rows,
        merge_area=merge_area,
        assignment=assignment,
        num_padded=max(assignment.loads) // merge_area,
    )
