"""The tables of windows packed into rows and frames on shelves, held against what the grids alone say.

Like `tables`, slow and without code of what it checks. Cells stand in slots; a slot without a cell is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vlexport.parity.tables import Call, Cell, Finding

EMPTY = -1
SHELF, COUNT = "frame_cells_", "frame_counts_"


def has_rows(tables: Mapping[str, Tensor]) -> bool:
    """Whether a call uses this form."""
    return "window_segments" in tables


def is_row_table(name: str) -> bool:
    """Whether a table of this name is checked here."""
    return name in ("window_segments", "frame_places") or name.startswith((SHELF, COUNT))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slots:
    """Which cell stands in each slot, by what `inverse` says."""

    slot_of: tuple[int, ...]
    cell_in: Mapping[int, Cell]
    unit: int


def check_row_tables(tables: Mapping[str, Tensor], call: Call) -> list[Finding]:
    """A finding for every table of this form."""
    cells = call.cells()
    slot_of = tuple(tables["inverse"].tolist())
    cell_in = dict(zip(slot_of, cells, strict=False))
    slots = _Slots(slot_of=slot_of, cell_in=cell_in, unit=call.merge**2)
    order = tables["order"].tolist()
    back = [place for place, slot in enumerate(slots.slot_of) if not _holds(order, slot, place)]
    twice = len(cells) - len(set(slots.slot_of)) + abs(len(slots.slot_of) - len(cells))
    return [
        Finding(table="order", wrong=len(back), first=f"cell {back[0]} is not in its slot" if back else ""),
        Finding(table="inverse", wrong=twice, first="two cells in one slot" if twice else ""),
        _windows(tables["window_segments"].tolist(), slots, call),
        *_frames(tables, slots, call),
    ]


def _holds(order: Sequence[int], slot: int, cell: int) -> bool:
    return 0 <= slot < len(order) and order[slot] == cell


def _windows(rows: Sequence[Sequence[int]], slots: _Slots, call: Call) -> Finding:
    """Slots of a row with one number are one window; empty slots have the number of none."""
    groups: dict[tuple[int, int], set[Cell]] = {}
    split = misplaced = 0
    for row, numbers in enumerate(rows):
        for place in range(0, len(numbers), slots.unit):
            several = set(numbers[place : place + slots.unit])
            split += len(several) - 1
            slot = (row * len(numbers) + place) // slots.unit
            cell, number = slots.cell_in.get(slot), numbers[place]
            misplaced += (cell is None) != (number == EMPTY)
            if cell is not None:
                groups.setdefault((row, number), set()).add(cell)
    found = Counter(frozenset(group) for group in groups.values())
    wanted = call.windows()
    wrong = sum((found - wanted).values()) + sum((wanted - found).values()) + split + misplaced
    return Finding(table="window_segments", wrong=wrong, first="not the windows of the grid" if wrong else "")


def _frames(tables: Mapping[str, Tensor], slots: _Slots, call: Call) -> list[Finding]:
    """Each row of a shelf is one frame and each frame has one row; `frame_places` finds every cell again."""
    found: Counter[frozenset[Cell]] = Counter()
    place_of: dict[int, int] = {}
    base = 0
    for name in sorted(name for name in tables if name.startswith(SHELF)):
        shelf = tables[name].tolist()
        counts = tables[COUNT + name.removeprefix(SHELF)].tolist()
        for row, (taken, count) in enumerate(zip(shelf, counts, strict=True)):
            length = count // slots.unit
            if count % slots.unit == 0 and count:
                found[frozenset(slots.cell_in.get(slot, (-1, -1, -1, -1)) for slot in taken[:length])] += 1
            for at, slot in enumerate(taken[:length]):
                place_of[slot] = base + row * len(taken) + at
        base += sum(map(len, shelf))
    wanted = call.frames()
    strange = sum((found - wanted).values()) + sum((wanted - found).values())
    places = tables["frame_places"].tolist()
    lost = [slot for slot in slots.slot_of if not _holds(places, slot, place_of.get(slot, EMPTY))]
    return [
        Finding(table="frame_cells", wrong=strange, first="not the frames of the call" if strange else ""),
        Finding(table="frame_places", wrong=len(lost), first=f"slot {lost[0]} is not found" if lost else ""),
    ]
