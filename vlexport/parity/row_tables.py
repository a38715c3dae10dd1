"""The tables of windows packed into rows and frames on shelves, held against what the grids alone say.

Like `tables`, slow and without code of what it checks. Cells stand in slots; a slot without a cell is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vlexport.parity.tables import Call, Cell, Finding, check_positions

EMPTY = -1
SHELVED = ("frame", "slice", "group")


def has_rows(tables: Mapping[str, Tensor]) -> bool:
    """Return whether a call uses this form, with windows or without."""
    return any(map(is_row_table, tables))


def is_row_table(name: str) -> bool:
    """Whether a table of this name is checked here."""
    shelves = tuple(f"{each}_{part}_" for each in SHELVED for part in ("cells", "counts"))
    return name in ("window_segments", "frame_places") or name.startswith(shelves)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slots:
    """Which cell stands in each slot, by what `inverse` says."""

    slot_of: tuple[int, ...]
    cell_in: Mapping[int, Cell]
    unit: int


def check_row_tables(tables: Mapping[str, Tensor], call: Call) -> list[Finding]:
    """Return a finding for every table of this form that is there; without `order`, slots are cells."""
    cells = call.cells()
    plain = torch.arange(len(cells))
    slot_of = tuple(tables.get("inverse", plain).tolist())
    cell_in = dict(zip(slot_of, cells, strict=False))
    slots = _Slots(slot_of=slot_of, cell_in=cell_in, unit=call.merge**2)
    order = tables.get("order", plain).tolist()
    back = [place for place, slot in enumerate(slots.slot_of) if not _holds(order, slot, place)]
    twice = len(cells) - len(set(slots.slot_of)) + abs(len(slots.slot_of) - len(cells))
    first = f"cell {back[0]} is not in its slot" if back else ""
    found = {
        "order": Finding(table="order", wrong=len(back), first=first),
        "inverse": Finding(table="inverse", wrong=twice, first="two cells in one slot" if twice else ""),
    }
    checked = [finding for name, finding in found.items() if name in tables]
    checked += check_positions(tables, call)
    if "window_segments" in tables and call.window_side is not None:
        checked.append(_windows(tables["window_segments"].tolist(), slots, call))
    return [*checked, *(_frames(tables, slots, call) if "frame_places" in tables else [])]


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
    shelved = shelves_of(tables, "frame", slots.cell_in, slots.unit)
    return [shelved.held_to(call.frames()), shelved.found_again(tables["frame_places"], slots.slot_of)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelved:
    """What stands on the shelves of a kind of segment: the cells of each row, the place of each slot."""

    kind: str
    rows: tuple[frozenset[Cell], ...]
    place_of: Mapping[int, int]

    def held_to(self, wanted: Counter[frozenset[Cell]]) -> Finding:
        """Each segment has one row; rows of no cell fill empty shelves."""
        found = Counter(row for row in self.rows if row)
        strange = sum((found - wanted).values()) + sum((wanted - found).values())
        first = f"not the {self.kind}s of the call" if strange else ""
        return Finding(table=f"{self.kind}_cells", wrong=strange, first=first)

    def found_again(self, places: Tensor, slots: Sequence[int]) -> Finding:
        """Every slot's place on the shelves."""
        listed = places.tolist()
        lost = [slot for slot in slots if not _holds(listed, slot, self.place_of.get(slot, EMPTY))]
        first = f"slot {lost[0]} is not found" if lost else ""
        return Finding(table=f"{self.kind}_places", wrong=len(lost), first=first)


def shelves_of(tables: Mapping[str, Tensor], kind: str, cell_in: Mapping[int, Cell], unit: int) -> Shelved:
    """Read all shelves of a kind. A shelf that nothing stands on has one row of one cell of another's."""
    names = sorted(name for name in tables if name.startswith(f"{kind}_cells_"))
    shelves = [(tables[name], tables[name.replace("_cells_", "_counts_")].tolist()) for name in names]
    starts = accumulate((shelf.numel() for shelf, _ in shelves), initial=0)
    rows: dict[tuple[int, int], frozenset[Cell]] = {}
    place_of: dict[int, int] = {}
    # Single cells last, when it is known what is on the others.
    for at, start in sorted(enumerate(starts), key=lambda pair: _is_cell(shelves[pair[0] : pair[0] + 1])):
        for row, taken in enumerate(shelves[at][0].tolist() if at < len(shelves) else []):
            length, left = divmod(shelves[at][1][row], unit)
            filler = len(taken) == 1 and taken[0] in place_of
            real = [] if left or filler else taken[:length]
            rows[at, row] = frozenset(cell_in.get(slot, (-1, -1, -1, -1)) for slot in real)
            place_of |= {slot: start + row * len(taken) + column for column, slot in enumerate(real)}
    return Shelved(kind=kind, rows=tuple(rows[place] for place in sorted(rows)), place_of=place_of)


def _is_cell(shelf: Sequence[tuple[Tensor, Sequence[int]]]) -> bool:
    return not shelf or shelf[0][0].numel() == 1
