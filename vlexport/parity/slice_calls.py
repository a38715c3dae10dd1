"""Tables of calls whose images are cut into slices, held against sizes and frame numbers, patch by patch.

Nothing here shares code with what it checks. Equal slices and groups may come in any order; which patches
make them up, and where each patch stands, is exact.
A patch is (item, slice, row, column); a group is the slices of an item that are asked together.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlexport.parity.row_tables import shelves_of
from vlexport.parity.tables import Cell, Finding, between, equal, permutation, segments, taken
from vlexport.specs import MediaItem
from vlexport.vision.slice_facts import SliceFacts

# What each check needs to be among the inputs.
SEGMENTS = ("slice_runs", "group_runs", "slice_bounds", "group_bounds", "group_inverse")
SHELVES = ("slice_places",)
SLICE_TABLES = ("order", *SEGMENTS, *SHELVES, "position_ids", "cells", "frames")
NO_TIME, LATEST, LONGEST = -1, 200, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One slice of a call: its item, its number there, its sides, its frame number and its group's number."""

    item: int
    number: int
    rows: int
    columns: int
    frame: int
    group: int

    def patches(self) -> list[Cell]:
        cells = ((row, column) for row in range(self.rows) for column in range(self.columns))
        return [(self.item, self.number, row, column) for row, column in cells]


def pieces_of(items: Sequence[MediaItem]) -> list[Piece]:
    """Slices as they come; an item without a single time is asked slice by slice."""
    found: list[Piece] = []
    group = 0
    for item_number, item in enumerate(items):
        sizes = item.slices or (item.grid[1:],) * item.grid[0]
        times = [(place, time) for place, times in enumerate(item.frame_groups) for time in times]
        together = any(time > NO_TIME for _, time in times)
        for number, (rows, columns) in enumerate(sizes):
            place, frame = times[number] if times else (number, NO_TIME)
            found.append(
                Piece(
                    item=item_number,
                    number=number,
                    rows=rows,
                    columns=columns,
                    frame=frame,
                    group=group + (place if together else number),
                )
            )
        group = found[-1].group + 1
    return found


def check_slice_tables(
    tables: Mapping[str, Tensor], items: Sequence[MediaItem], facts: SliceFacts
) -> list[Finding]:
    """A finding for every table that is there."""
    listed = {name: table.tolist() for name, table in tables.items() if name in SLICE_TABLES}
    pieces = {(piece.item, piece.number): piece for piece in pieces_of(items)}
    patches = [patch for piece in pieces.values() for patch in piece.patches()]
    seen = taken(patches, listed["order"])
    nowhere = Piece(item=-1, number=-1, rows=1, columns=1, frame=NO_TIME, group=-1)
    piece_of = [pieces.get(patch[:2], nowhere) for patch in seen]
    found = [
        permutation("order", listed["order"], len(patches)),
        *_segments(tables, list(pieces.values()), seen, facts.queries),
    ]
    wanted: dict[str, Sequence[object]] = {
        "cells": [list(patch[2:]) for patch in seen],
        "frames": [piece.frame for piece in piece_of],
        "position_ids": _buckets(seen, piece_of, facts),
    }
    return [*found, *(equal(name, listed[name], wanted[name]) for name in wanted if name in listed)]


def _segments(
    tables: Mapping[str, Tensor], pieces: Sequence[Piece], seen: Sequence[Cell], queries: int
) -> Iterator[Finding]:
    """Every slice is one segment; every group is one, is asked all queries, and is found again."""
    members: dict[int, set[Cell]] = {}
    for piece in pieces:
        members.setdefault(piece.group, set()).update(piece.patches())
    groups = [frozenset(members[group]) for group in sorted(members)]
    slices = [frozenset(piece.patches()) for piece in pieces]
    if "slice_places" in tables:
        yield from _on_shelves(tables, (slices, groups), dict(enumerate(seen)))
        return
    if "slice_runs" in tables:
        runs = tables["group_runs"].tolist()
        asked = [number for number, run in enumerate(runs) if run[1] != queries]
        first = f"run {asked[0]} asks {runs[asked[0]][1]} queries, not {queries}" if asked else ""
        yield segments("slice_runs", tables["slice_runs"].tolist(), seen, (Counter(slices), 1))
        yield segments("group_runs", [[run[0], run[2]] for run in runs], seen, (Counter(groups), 1))
        yield Finding(table="queries", wrong=len(asked), first=first)
    else:
        yield from between("slice", tables, seen, (Counter(slices), 1))
        yield from between("group", tables, seen, (Counter(groups), 1))
    group_of = {patch: group for group, each in enumerate(groups) for patch in each}
    in_sequence = list(dict.fromkeys(group_of.get(patch, -1) for patch in seen))
    places = [in_sequence.index(group) if group in in_sequence else -1 for group in range(len(groups))]
    yield equal("group_inverse", tables["group_inverse"].tolist(), places)


def _on_shelves(
    tables: Mapping[str, Tensor],
    wanted: tuple[Sequence[frozenset[Cell]], Sequence[frozenset[Cell]]],
    seen: Mapping[int, Cell],
) -> Iterator[Finding]:
    """Slices and groups have a row each; equal ones may exchange theirs."""
    slices = shelves_of(tables, "slice", seen, 1)
    groups = shelves_of(tables, "group", seen, 1)
    yield slices.held_to(Counter(wanted[0]))
    yield slices.found_again(tables["slice_places"], range(len(seen)))
    yield groups.held_to(Counter(wanted[1]))
    rows = tables["group_inverse"].tolist()
    given = [groups.rows[row] if 0 <= row < len(groups.rows) else None for row in rows]
    yield equal("group_inverse", given, wanted[1])


def _buckets(seen: Sequence[Cell], piece_of: Sequence[Piece], facts: SliceFacts) -> list[int]:
    """Each axis of a slice stretched over a side of the table; without a grid the slice is one long row."""
    side = facts.side
    borders = np.arange(1 / side, 1.0, 1 / side).astype(np.float32).tolist()

    def bucket(place: int, length: int) -> int:
        return bisect_right(borders, float(np.float32(place) / np.float32(length)))

    found = []
    for (_, _, row, column), piece in zip(seen, piece_of, strict=True):
        if facts.grid_in_tower:
            found.append(bucket(row, piece.rows) * side + bucket(column, piece.columns))
        else:
            found.append(bucket(row * piece.columns + column, piece.rows * piece.columns))
    return found


def sliced_mixes(facts: SliceFacts, *, many: int, seed: int) -> Iterator[list[MediaItem]]:
    """Random calls, and one of more patches than 16-bit numbers count; groups where keys carry times."""
    draw = random.Random(seed)
    width, timed, videos = 3 * facts.patch**2, facts.frame_times, facts.release.videos
    for _ in range(40):
        yield [_random_item(draw, width, videos=videos, timed=timed) for _ in range(draw.randint(1, 4))]
    yield [_item("image", [(110, -(-many // 110))], (), width)]
    if timed:
        # The first frame has the number 0; a video of which only one frame has a time; one without any.
        times = (((0,), (NO_TIME, NO_TIME)), ((NO_TIME,), (3, NO_TIME)), ((NO_TIME, NO_TIME), (NO_TIME,)))
        yield [_item("video", [(2, 3)] * 3, each, width) for each in times]


def _random_item(draw: random.Random, width: int, *, videos: bool, timed: bool) -> MediaItem:
    """A cut image, or a video with or without times."""
    sizes = [(draw.randint(1, LONGEST), draw.randint(1, LONGEST)) for _ in range(2)]
    count = draw.choice((1, 2, 3, 5))
    if not (videos and draw.random() < 0.5):
        return _item("image", [sizes[0], *[sizes[1]] * (count - 1)], (), width)
    groups: list[tuple[int, ...]] = []
    while timed and sum(map(len, groups)) < count:
        size = draw.randint(1, min(3, count - sum(map(len, groups))))
        groups.append(tuple(draw.choice((NO_TIME, draw.randint(0, LATEST))) for _ in range(size)))
    return _item("video", [sizes[0]] * count, tuple(groups), width)


def _item(
    kind: str, sizes: Sequence[tuple[int, int]], groups: tuple[tuple[int, ...], ...], width: int
) -> MediaItem:
    """Without memory: one zero, seen as all patches."""
    rows = torch.zeros(1, 1).expand(sum(down * across for down, across in sizes), width)
    return MediaItem(
        kind=kind, patches=rows, grid=(len(sizes), *sizes[-1]), slices=tuple(sizes), frame_groups=groups
    )


def count_tokens(items: Sequence[MediaItem], queries: int) -> list[int]:
    """Tokens of each item: its groups, each asked once."""
    groups: dict[int, set[int]] = {}
    for piece in pieces_of(items):
        groups.setdefault(piece.item, set()).add(piece.group)
    return [queries * len(groups[item]) for item in sorted(groups)]
