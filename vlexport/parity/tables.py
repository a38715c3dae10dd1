"""Index tables of the calls that are compared, cell by cell against sizes and declared segmentations.

Nothing here shares code with what it checks. Segments may come in any order, and so may the cells inside one;
which cells make up a segment, and that each cell is there once, is exact.
A cell is (item, slice, row, column), `unit` patches; a frame that is not cut is one slice. Learned rows of a
tower are cells of row -1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Any, TypeVar

from torch import Tensor

from vlexport.specs import MediaItem
from vlexport.vision.attention.packing import Packing
from vlexport.vision.attention.segmentation import Segmentation

Cell = tuple[int, int, int, int]
Segment = frozenset[Cell | None]
T = TypeVar("T")
# The first fault of every table, empty where it is right.
Faults = dict[str, str]
NO_TIME = EMPTY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One slice of a call: item, number, sides in cells, frame, group; `learned` are the tower's own rows."""

    item: int
    number: int
    rows: int
    columns: int
    frame: int
    group: int
    learned: int = 0

    def cells(self) -> Iterator[Cell]:
        yield from ((self.item, self.number, EMPTY, number) for number in range(self.learned))
        for row in range(self.rows):
            for column in range(self.columns):
                yield self.item, self.number, row, column


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Everything that sizes, slices and frame numbers of a call's items imply.

    absent  cells of the items' grids that the call does not have
    """

    pieces: tuple[Piece, ...]
    merge: int
    absent: frozenset[Cell] = frozenset()

    @classmethod
    def of(cls, items: Sequence[MediaItem], merge: int, learned: int = 0) -> Call:
        pieces, absent = list[Piece](), set[Cell]()
        for number, item in enumerate(items):
            group = pieces[-1].group + 1 if pieces else 0
            sizes = item.slices or (item.grid[1:],) * item.grid[0]
            times = [(place, time) for place, times in enumerate(item.frame_groups) for time in times]
            together = any(time > NO_TIME for _, time in times)
            for at, (rows, columns) in enumerate(sizes):
                place, frame = times[at] if times else (at, NO_TIME)
                sides = {"rows": rows // merge, "columns": columns // merge}
                own = group + (place if together else at)
                pieces.append(Piece(item=number, number=at, **sides, frame=frame, group=own, learned=learned))
            if item.cells is not None:
                cells = [cell for piece in pieces if piece.item == number for cell in piece.cells()]
                absent |= {cells[at] for at in {*range(len(cells))} - {*item.cells.tolist()}}
        return cls(pieces=tuple(pieces), merge=merge, absent=frozenset(absent))

    @classmethod
    def of_blocks(cls, items: Sequence[MediaItem], packing: Packing) -> Call:
        return cls.of(items, math.isqrt(packing.unit), packing.learned)

    def cells(self) -> list[Cell]:
        return [cell for piece in self.pieces for cell in piece.cells() if cell not in self.absent]

    def segments(self, kind: Segmentation) -> list[Segment] | None:
        side = math.isqrt(kind.largest or 0)
        group = {(piece.item, piece.number): piece.group for piece in self.pieces}
        keys: dict[str, Callable[[Cell], object]] = {
            "window": lambda cell: (*cell[:2], cell[2] // side, cell[3] // side),
            "frame": lambda cell: cell[:2],
            "slice": lambda cell: cell[:2],
            "image": lambda cell: cell,
            "group": lambda cell: group[cell[:2]],
        }
        if kind.name not in keys or (kind.name == "window" and not side):
            return None
        members: dict[Any, set[Cell]] = {}
        for cell in self.cells():
            members.setdefault(keys[kind.name](cell), set()).add(cell)
        return [frozenset(cells) for cells in members.values()]

    def patches(self, cell: Cell | None) -> list[list[int]]:
        _, _, row, column = cell or (EMPTY,) * 4
        side = range(self.merge)
        return [[row * self.merge + down, column * self.merge + across] for down in side for across in side]

    def num_tokens(self, item: int, queried: Segmentation | None) -> int:
        own = [piece for piece in self.pieces if piece.item == item]
        if queried is not None:
            return queried.queries * len({piece.group for piece in own})
        return sum(piece.rows * piece.columns for piece in own) - sum(cell[0] == item for cell in self.absent)

    def raster(self) -> Iterator[list[int]]:
        start = 0
        for piece in self.pieces:
            columns = piece.columns * self.merge
            for cell in piece.cells():
                yield [start + row * columns + column for row, column in self.patches(cell)]
            start += piece.rows * self.merge * columns


def check_tables(tables: Mapping[str, Tensor], items: Sequence[MediaItem], packing: Packing) -> Faults:
    """Return the first fault of every table that has a rule here."""
    call, unit = Call.of_blocks(items, packing), packing.unit
    cells = call.cells()
    listed = {name: table.tolist() for name, table in tables.items() if not table.is_floating_point()}
    slots, faults = _slots(listed, cells)
    sizes = {
        (piece.item, piece.number): [piece.rows * call.merge, piece.columns * call.merge]
        for piece in call.pieces
    }
    frame = {(piece.item, piece.number): [piece.frame] * unit for piece in call.pieces}
    rows: dict[str, Iterable[list[Any]]] = {
        "positions": (call.patches(cell) for cell in cells),
        "sides": ([sizes[cell[:2]]] * unit for cell in cells),
        "cells": (call.patches(cell) for cell in slots),
        "frames": (frame.get((cell or (EMPTY, EMPTY))[:2], []) for cell in slots),
        "raster": call.raster(),
        **_around_learned(items, packing),
    }
    for name in rows.keys() & listed.keys():
        faults[name] = difference(listed[name], list(chain.from_iterable(rows[name])))
    for kind in packing.segmentations:
        if (segments := call.segments(kind)) is not None:
            faults |= _check_kind(kind, listed, slots, segments, unit)
    return faults


def _around_learned(items: Sequence[MediaItem], packing: Packing) -> dict[str, list[list[Any]]]:
    """Return tables of towers with learned rows, list by list: sources of rows, and rows of merged cells."""
    call, learned = Call.of(items, packing.merge), packing.learned
    if not learned:
        return {}
    patches, merged, rows = call.raster(), list[list[Any]](), list[list[Any]]()
    for number, piece in enumerate(call.pieces, start=1):
        cells = list(islice(patches, piece.rows * piece.columns))
        merged.append([[row + number * learned for row in cell] for cell in cells])
        rows.append([*range(learned), *sorted(learned + row for cell in cells for row in cell)])
    places = [
        [[*divmod(place, columns), max(height, columns)] for place in range(height * columns)]
        for item in items
        for height, columns in [item.grid[1:]] * item.grid[0]
    ]
    tubelets = [[int(item.kind == "video")] * math.prod(item.grid) for item in items]
    return {"merged": merged, "rows": rows, "places": places, "tubelets": tubelets}


def _slots(listed: Mapping[str, Any], cells: Sequence[Cell]) -> tuple[list[Cell | None], Faults]:
    order, inverse = listed["order"], listed.get("inverse")
    if inverse is None:
        return taken(cells, order), {"order": permutation(order, len(cells))}
    held = dict(zip(inverse, cells, strict=False))
    slots = [held.get(slot) for slot in range(len(order))]
    lost = [at for at, slot in enumerate(inverse) if not (0 <= slot < len(order) and order[slot] == at)]
    order_fault = f"cell {lost[0]} is not in its slot" if lost else ""
    if None in slots and not any(name.endswith("_segments") for name in listed):
        order_fault = f"slot {slots.index(None)} is empty"
    whole = len(held) == len(inverse) == len(cells)
    return slots, {"order": order_fault, "inverse": "" if whole else "not one slot for each cell"}


def _check_kind(
    kind: Segmentation,
    listed: Mapping[str, Any],
    slots: Sequence[Cell | None],
    expected: Sequence[Segment],
    unit: int,
) -> Faults:
    prefix, longest = f"{kind.name}_", f"longest_{kind.name}"
    own = {name.removeprefix(prefix): table for name, table in listed.items() if name.startswith(prefix)}
    faults: Faults = {}
    seen, segments = slots, list(expected)
    if "order" in own:
        seen, slot_of = taken(slots, own["order"]), {slot: place for place, slot in enumerate(own["order"])}
        faults["order"] = permutation(own["order"], len(slots))
        faults["inverse"] = difference(
            own["inverse"], [slot_of.get(slot, EMPTY) for slot in range(len(slots))]
        )
    if "segments" in own:
        faults["segments"] = _packed(own["segments"], slots, expected, unit)
    if "runs" in own:
        lengths = chain.from_iterable([run[-1]] * min(run[0], len(seen) + 1) for run in own["runs"])
        segments, fault = _cut(seen, lengths, unit)
        other = [run for run in own["runs"] if kind.queries and run[1] != kind.queries]
        fault = f"run {other[0]} does not have {kind.queries} queries" if other else fault
        faults["runs"] = fault or _unlike(segments, expected)
    if "bounds" in own:
        segments, fault = _cut(seen, (stop - start for start, stop in pairwise(own["bounds"])), unit)
        fault = fault if own["bounds"][:1] == [0] else "the first is not 0"
        faults["bounds"] = fault or _unlike(segments, expected)
    if buckets := sorted(name for name in own if name.startswith("cells_")):
        counts = [name.replace("cells_", "counts_") for name in buckets]
        pairs = [(own[one], own[other]) for one, other in zip(buckets, counts, strict=True)]
        segments, place_of = _buckets(pairs, slots, unit)
        faults |= dict.fromkeys((*buckets, *counts), _unlike(filter(None, segments), expected))
        if "places" in own:
            places = [place if cell else None for cell, place in zip(slots, own["places"], strict=False)]
            faults["places"] = difference(
                places, [place_of.get(slot) if cell else None for slot, cell in enumerate(slots)]
            )
    if kind.queries and "inverse" in own:
        faults["inverse"] = difference(taken(segments, own["inverse"]), expected)
    faults = {f"{prefix}{name}": fault for name, fault in faults.items()}
    if longest in listed:
        size, most = len(listed[longest]), max(map(len, expected))
        faults[longest] = f"{size} cells are fewer than the longest segment has" if size < most else ""
    return faults


def _cut(seen: Sequence[Cell | None], lengths: Iterable[int], unit: int) -> tuple[list[Segment], str]:
    segments: list[Segment] = []
    place, fault = 0, ""
    for length in islice(lengths, len(seen) + 1):
        if length < 1 or length % unit:
            fault = f"a segment of {length} patches"
        size = max(length // unit, 1)
        segments.append(frozenset(seen[place : place + size]))
        place += size
    return segments, f"segments cover {place} of {len(seen)} cells" if place != len(seen) else fault


def _unlike(segments: Iterable[Segment], expected: Iterable[Segment]) -> str:
    ours, theirs = Counter(segments), Counter(expected)
    for strange in ours - theirs:
        return f"segment {sorted(strange, key=str)[:3]}.. is none"
    return "a segment is not there" if theirs - ours else ""


def _packed(
    rows: Sequence[Sequence[int]], slots: Sequence[Cell | None], expected: Sequence[Segment], unit: int
) -> str:
    """Return a fault unless slots of one number in a row are one segment, and empty slots have none."""
    groups: dict[tuple[int, int], set[Cell | None]] = {}
    places = (
        (row, numbers[at : at + unit])
        for row, numbers in enumerate(rows)
        for at in range(0, len(numbers), unit)
    )
    for slot, (row, numbers) in enumerate(places):
        if len(set(numbers)) > 1:
            return f"patches of slot {slot} have several numbers"
        if (slots[slot] is None) != (numbers[0] == EMPTY):
            return f"slot {slot} has number {numbers[0]}"
        if slots[slot] is not None:
            groups.setdefault((row, numbers[0]), set()).add(slots[slot])
    return _unlike(map(frozenset, groups.values()), expected)


def _buckets(
    buckets: Sequence[tuple[list[list[int]], list[int]]], slots: Sequence[Cell | None], unit: int
) -> tuple[list[Segment], dict[int, int]]:
    """Return the segment in each row of all buckets, cells and counts, and the place of each slot in them.

    A bucket that holds nothing has one row of one cell of another bucket's; its segment is empty.
    """
    rows: dict[tuple[int, int], Segment] = {}
    place_of: dict[int, int] = {}
    starts = [*accumulate((len(cells) * len(cells[0]) for cells, _ in buckets), initial=0)]
    # Single cells last, when it is known what the others hold.
    for at in sorted(range(len(buckets)), key=lambda at: [len(row) for row in buckets[at][0]] == [1]):
        cells, counts = buckets[at]
        for row, held in enumerate(cells):
            length, left = divmod(counts[row], unit)
            filler = len(held) == 1 and held[0] in place_of
            real = [] if left or filler else held[:length]
            rows[at, row] = frozenset(taken(slots, real))
            place_of |= {slot: starts[at] + row * len(held) + column for column, slot in enumerate(real)}
    return [rows[place] for place in sorted(rows)], place_of


def taken(cells: Sequence[T], order: Sequence[int]) -> list[T | None]:
    """Return cells in this order; places that do not exist give none."""
    return [cells[place] if 0 <= place < len(cells) else None for place in order]


def difference(ours: Sequence[object], expected: Sequence[object]) -> str:
    """Return the first entry that differs, if one does."""
    if len(ours) != len(expected):
        return f"{len(ours)} rows, not {len(expected)}"
    pairs = enumerate(zip(ours, expected, strict=True))
    return next((f"row {at} is {one}, not {other}" for at, (one, other) in pairs if one != other), "")


def permutation(order: Sequence[int], count: int) -> str:
    """Return what is wrong with an order in which every one of so many comes once."""
    missing = sorted(set(range(count)) - set(order))
    if missing:
        return f"{missing[0]} is not there"
    return f"{len(order)} entries for {count}" if len(order) != count else ""
