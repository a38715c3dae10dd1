"""Index tables of a call held against what the grids alone say, cell by cell. Slow, and on purpose.

Nothing here shares code with what it checks. A table may order equal segments and the cells inside one as it
likes; which cells make up a segment, and that each cell is there once, is exact.
A cell is (item, frame, row, column), merge x merge patches; M cells and N patches in a call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vlexport.vision.attention.packing import Packing

Grid = tuple[int, int, int]
Cell = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """How many entries of a table are wrong, and the first of them."""

    table: str
    wrong: int
    first: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The grids of a call, and everything that they imply."""

    grids: tuple[Grid, ...]
    merge: int
    window_side: int | None

    def cells(self) -> list[Cell]:
        """Every cell in the order of the input."""
        return [
            (item, frame, row, column)
            for item, (frames, rows, columns) in enumerate(self.grids)
            for frame in range(frames)
            for row in range(rows // self.merge)
            for column in range(columns // self.merge)
        ]

    def frames(self) -> Counter[frozenset[Cell]]:
        return _grouped(self.cells(), lambda cell: cell[:2])

    def windows(self) -> Counter[frozenset[Cell]]:
        side = self.window_side
        assert side is not None
        return _grouped(self.cells(), lambda cell: (*cell[:2], cell[2] // side, cell[3] // side))

    def positions(self) -> Tensor:
        """Return row and column of every patch: cell by cell, row by row inside a cell."""
        merge = self.merge
        found = [torch.empty(0, 2, dtype=torch.int64)]
        for frames, rows, columns in self.grids:
            places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
            cells = places.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
            found.append(cells.reshape(-1, 2).repeat(frames, 1))
        return torch.cat(found)


def call_of(packing: Packing, grids: Sequence[Grid]) -> Call | None:
    """Return the call as this packing declares it, or None if its tokens are not squares of patches."""
    if packing.queried is not None:
        return None
    sides = [math.isqrt(kind.largest) for kind in packing.segmentations if kind.largest is not None]
    return Call(grids=tuple(grids), merge=packing.merge, window_side=sides[0] if sides else None)


# What each check needs to be among the inputs; a table in none of these has no reference here.
ORDERS = ("positions", "order", "inverse", "frame_order", "frame_inverse")
SEGMENTS = ("window_runs", "window_bounds", "frame_runs", "frame_bounds")
CHECKED = (*ORDERS, *SEGMENTS)


def check_tables(tables: Mapping[str, Tensor], call: Call) -> list[Finding]:
    """A finding for every table that is there."""
    listed = {
        name: table.tolist() for name, table in tables.items() if name in CHECKED and name != "positions"
    }
    found = check_positions(tables, call)
    cells = call.cells()
    seen = cells
    if "order" in listed:
        found.append(permutation("order", listed["order"], len(cells)))
        seen = taken(cells, listed["order"])
    if {"order", "inverse"} <= set(listed):
        found.append(_undoes("inverse", listed["inverse"], listed["order"]))
    if call.window_side is not None:
        found += between("window", listed, seen, (call.windows(), call.merge))
    if "frame_order" in listed:
        found.append(permutation("frame_order", listed["frame_order"], len(cells)))
        seen = taken(seen, listed["frame_order"])
    if {"frame_order", "frame_inverse"} <= set(listed):
        found.append(_undoes("frame_inverse", listed["frame_inverse"], listed["frame_order"]))
    return [*found, *between("frame", listed, seen, (call.frames(), call.merge))]


def between(
    kind: str,
    tables: Mapping[str, Any],
    cells: Sequence[Cell],
    wanted: tuple[Counter[frozenset[Cell]], int],
) -> Iterator[Finding]:
    """How a call is cut into segments: as runs of equal ones, or by bounds of which the first is 0."""
    runs, bounds = f"{kind}_runs", f"{kind}_bounds"
    listed = {name: [*tables[name]] for name in (runs, bounds) if name in tables}
    if runs in listed:
        yield segments(runs, listed[runs], cells, wanted)
    if bounds in listed:
        ends = [int(each) for each in listed[bounds]]
        found = segments(bounds, [[1, stop - start] for start, stop in pairwise(ends)], cells, wanted)
        begins_late = ends[:1] != [0]
        yield replace(found, wrong=found.wrong + 1, first="the first is not 0") if begins_late else found


def _grouped(cells: Sequence[Cell], key: Callable[[Cell], tuple[int, ...]]) -> Counter[frozenset[Cell]]:
    groups: dict[tuple[int, ...], set[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), set()).add(cell)
    return Counter(frozenset(group) for group in groups.values())


def taken(cells: Sequence[Cell], order: Sequence[int]) -> list[Cell]:
    """Cells in this order; places that do not exist give a cell that does not exist."""
    return [cells[place] if 0 <= place < len(cells) else (-1, -1, -1, -1) for place in order]


def check_positions(tables: Mapping[str, Tensor], call: Call) -> list[Finding]:
    """Return the finding on the places of patches, if they are among the tables."""
    if "positions" not in tables:
        return []
    given, wanted = tables["positions"], call.positions()
    if torch.equal(given.to(wanted.dtype), wanted):
        return [Finding(table="positions", wrong=0)]
    return [equal("positions", given.tolist(), wanted.tolist())]


def equal(table: str, given: Sequence[object], expected: Sequence[object]) -> Finding:
    """Entry by entry."""
    if len(given) != len(expected):
        return Finding(table=table, wrong=max(len(given), 1), first=f"{len(given)} rows, not {len(expected)}")
    places = [place for place, pair in enumerate(zip(given, expected, strict=True)) if pair[0] != pair[1]]
    first = f"row {places[0]} is {given[places[0]]}, not {expected[places[0]]}" if places else ""
    return Finding(table=table, wrong=len(places), first=first)


def permutation(table: str, given: Sequence[int], count: int) -> Finding:
    """Every cell comes once."""
    missing = sorted(set(range(count)) - set(given))
    extra = len(given) - (count - len(missing))
    first = f"cell {missing[0]} is not there" if missing else f"{extra} cells too many" if extra else ""
    return Finding(table=table, wrong=len(missing) + abs(extra), first=first)


def _undoes(table: str, given: Sequence[int], order: Sequence[int]) -> Finding:
    back = {cell: place for place, cell in enumerate(order)}
    return equal(table, given, [back.get(cell, -1) for cell in range(len(order))])


def segments(
    table: str,
    runs: Sequence[Sequence[int]],
    cells: Sequence[Cell],
    wanted: tuple[Counter[frozenset[Cell]], int],
) -> Finding:
    """Walk the runs along the cells: each segment is one wanted group, and each group comes once."""
    expected, merge = wanted
    found: Counter[frozenset[Cell]] = Counter()
    place = ragged = 0
    for count, length in runs:
        ragged += (length % merge**2 != 0) + (count < 1) + (length < 1)
        size = max(length // merge**2, 1)
        for _ in range(count):
            if place >= len(cells):
                break
            found[frozenset(cells[place : place + size])] += 1
            place += size
    strange, missing = found - expected, expected - found
    covered = sum(count * length for count, length in runs) // merge**2
    uncovered = abs(covered - len(cells))
    wrong = sum(strange.values()) + sum(missing.values()) + ragged + uncovered
    first = f"segment {sorted(next(iter(strange)))[:3]}.. is none" if strange else ""
    if uncovered:
        first = f"runs cover {covered} of {len(cells)} cells"
    return Finding(table=table, wrong=wrong, first=first)
