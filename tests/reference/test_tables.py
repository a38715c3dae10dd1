"""Index tables and token counts of random calls, in every layout, cell by cell against sizes alone."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vlexport.recipes._minicpmv_reference import SliceFacts, facts_of

from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.parity.tables import Call, Cell, check_tables
from vlexport.recipe import find_recipe
from vlexport.specs import MediaItem
from vlexport.vision.attention.layout import LAYOUTS
from vlexport.vision.attention.packing import Packing

NUM_CALLS = 40
# Enough for 16-bit numbers to run over.
MANY_TOKENS = 33_000
NO_TIME, LATEST, LONGEST = -1, 200, 9
# Tables that `check_tables` has no rule for; the first has one here.
FAMILY = ("position_ids",)


def blank(kind: str, sizes: Sequence[tuple[int, int]], width: int, groups=(), *, cut=False) -> MediaItem:
    """Return an item without memory: one zero, seen as all patches."""
    rows = torch.zeros(1, 1).expand(sum(down * across for down, across in sizes), width)
    slices = tuple(sizes) if cut else ()
    return MediaItem(
        kind=kind, patches=rows, grid=(len(sizes), *sizes[-1]), slices=slices, frame_groups=tuple(groups)
    )


def merged_calls(packing: Packing) -> Iterator[list[MediaItem]]:
    """Yield the recipe's mixes, random ones of up to thirteen cells a side, and one of many tokens."""
    draw, side, width = random.Random(0), packing.merge, packing.row_width
    for mix in packing.mixes().values():
        yield [blank(kind, [grid[1:]] * grid[0], width) for kind, grid in mix]
    for _ in range(NUM_CALLS):
        kinds = [draw.choice(("image", "video")) for _ in range(draw.randint(1, 4))]
        counts = [1 if kind == "image" else draw.randint(1, 4) for kind in kinds]
        sizes = [(side * draw.randint(1, 13), side * draw.randint(1, 13)) for _ in kinds]
        yield [
            blank(kind, [size] * count, width) for kind, count, size in zip(kinds, counts, sizes, strict=True)
        ]


def sliced_calls(facts: SliceFacts) -> Iterator[list[MediaItem]]:
    """Yield random cut images and videos, in groups where keys carry times."""
    draw, width, timed = random.Random(0), 3 * facts.patch**2, facts.frame_times
    for _ in range(NUM_CALLS):
        yield [sliced_item(draw, facts, width) for _ in range(draw.randint(1, 4))]
    if timed:
        # The first frame has the number 0; a video of which only one frame has a time; one without any.
        times = (((0,), (NO_TIME, NO_TIME)), ((NO_TIME,), (3, NO_TIME)), ((NO_TIME, NO_TIME), (NO_TIME,)))
        yield [blank("video", [(2, 3)] * 3, width, each, cut=True) for each in times]


def sliced_item(draw: random.Random, facts: SliceFacts, width: int) -> MediaItem:
    one, other = [(draw.randint(1, LONGEST), draw.randint(1, LONGEST)) for _ in range(2)]
    count = draw.choice((1, 2, 3, 5))
    if not (facts.release.videos and draw.random() < 0.5):
        return blank("image", [one, *[other] * (count - 1)], width, cut=True)
    groups: list[tuple[int, ...]] = []
    while facts.frame_times and sum(map(len, groups)) < count:
        size = draw.randint(1, min(3, count - sum(map(len, groups))))
        groups.append(tuple(draw.choice((NO_TIME, draw.randint(0, LATEST))) for _ in range(size)))
    return blank("video", [one] * count, width, groups, cut=True)


def assert_right(packing: Packing, items: Sequence[MediaItem], layout: str) -> dict[str, Any]:
    """Assert that every table of integers has a rule and no fault, and that items have their tokens."""
    tables = packing.prepare(items, layout)
    found = check_tables(tables, items, packing)
    assert {name: fault for name, fault in found.items() if fault} == {}, items
    integers = {name for name, table in tables.items() if not table.is_floating_point()}
    assert integers - {*found, *FAMILY} == set()
    call = Call.of(items, packing.merge)
    wanted = [call.num_tokens(number, packing.queried) for number in range(len(items))]
    assert [packing.num_tokens(item) for item in items] == wanted
    return tables


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windowed") / "checkpoint"
    recipe = find_recipe("qwen2_5_vl")
    return recipe.packing(recipe.read_config(Checkpoint.open(write_tiny_qwen2_5_vl(folder, depth=1))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_and_frames_are_those_of_the_sizes(windowed, layout) -> None:
    for items in merged_calls(windowed):
        assert_right(windowed, items, layout)


@pytest.mark.seconds
def test_numbers_of_many_tokens_fit_their_type(windowed) -> None:
    sides = (2 * 110, 2 * -(-MANY_TOKENS // 110))
    assert_right(windowed, [blank("image", [sides], windowed.row_width)], "grouped")


def sliced(folder, version: str):
    path = write_tiny_minicpmv(folder / "checkpoint", Tiny(version=version, depth=1, with_decoder=False))
    recipe, checkpoint = find_recipe("minicpmv"), Checkpoint.open(path)
    return recipe.packing(recipe.read_config(checkpoint)), facts_of(checkpoint)


@pytest.mark.seconds
@pytest.mark.parametrize("version", VERSIONS)
def test_slices_groups_and_places_are_those_of_the_sizes(version, tmp_path) -> None:
    packing, facts = sliced(tmp_path, version)
    for items in sliced_calls(facts):
        for layout in LAYOUTS:
            tables = assert_right(packing, items, layout)
        if "position_ids" in tables:
            assert tables["position_ids"].tolist() == buckets(items, tables["order"].tolist(), facts)


def test_numbers_of_many_patches_fit_their_type(tmp_path) -> None:
    packing, facts = sliced(tmp_path, "2.6")
    items = [blank("image", [(110, -(-MANY_TOKENS // 110))], packing.row_width, cut=True)]
    tables = assert_right(packing, items, "grouped")
    assert tables["position_ids"].tolist() == buckets(items, tables["order"].tolist(), facts)


def buckets(items: Sequence[MediaItem], order: Sequence[int], facts: SliceFacts) -> list[int]:
    """Stretch each axis of a slice over a side of the table; without a grid a slice is one long row."""
    side = facts.side
    borders = np.arange(1 / side, 1.0, 1 / side).astype(np.float32).tolist()

    def bucket(place: int, length: int) -> int:
        return bisect_right(borders, float(np.float32(place) / np.float32(length)))

    call = Call.of(items, 1)
    sides = {(each.item, each.number): (each.rows, each.columns) for each in call.pieces}

    def place(cell: Cell) -> int:
        (rows, columns), (row, column) = sides[cell[:2]], cell[2:]
        if facts.grid_in_tower:
            return int(bucket(row, rows) * side + bucket(column, columns))
        return bucket(row * columns + column, rows * columns)

    cells = call.cells()
    return [place(cells[at]) for at in order]
