"""Every way in which an index table can be wrong is a fault; calls without one have none."""

from dataclasses import replace

import pytest
import torch

from tests.mutation.judge import silent
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.parity.check import Checker
from vlexport.parity.tables import Call, check_tables
from vlexport.recipe import find_recipe
from vlexport.specs import MediaItem
from vlexport.testing import in_torch
from vlexport.vision.attention.layout import LAYOUTS
from vlexport.vision.grid_tower import GridPacking


def item(packing, sizes, groups=(), *, cut=False):
    rows = torch.zeros(sum(down * across for down, across in sizes), packing.row_width)
    slices, kind = tuple(sizes) if cut else (), "image" if len(sizes) == 1 or cut else "video"
    return MediaItem(
        kind=kind, patches=rows, grid=(len(sizes), *sizes[-1]), slices=slices, frame_groups=groups
    )


@pytest.fixture(scope="module")
def windowed(subject_of):
    """Windows of 4 x 4 cells of 2 x 2 patches: an image, a video, a single cell."""
    packing = GridPacking(subject_of().config.rule, window_side=4)
    return packing, [item(packing, sizes) for sizes in ([(10, 12)], [(4, 10)] * 2, [(2, 2)])]


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    """A cut image, frames of which one has no time, a single slice."""
    path = write_tiny_minicpmv(tmp_path_factory.mktemp("timed") / "checkpoint", Tiny(version="4.5"))
    recipe = find_recipe("minicpmv")
    packing = recipe.packing(recipe.read_config(Checkpoint.open(path)))
    cut, frames = [(4, 3), (2, 5), (2, 5)], [(3, 4)] * 3
    items = [(cut, ()), (frames, ((0, 7), (-1,))), ([(1, 1)], ())]
    return packing, [item(packing, sizes, groups, cut=True) for sizes, groups in items]


def faults(call, layout="grouped", **changes):
    """Names of the tables with a fault, after some were changed."""
    packing, items = call
    tables = packing.prepare(items, layout)
    tables |= {name: change(tables[name]) for name, change in changes.items()}
    return {name for name, fault in check_tables(tables, items, packing).items() if fault}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_tables_have_no_faults_and_all_but_one_have_a_rule(windowed, sliced, layout):
    for packing, items in (windowed, sliced):
        tables = packing.prepare(items, layout)
        found = check_tables(tables, items, packing)
        assert not any(found.values())
        integers = {name for name, table in tables.items() if not table.is_floating_point()}
        assert integers - {*found} <= {"position_ids"}


CUTS = {
    "one short": lambda bounds: bounds[:-1],
    "no leading zero": lambda bounds: bounds[1:],
    "shifted": lambda bounds: bounds + 4,
    "one segment": lambda bounds: bounds[[0, -1]],
    "empty segment": lambda bounds: torch.cat([bounds, bounds[-1:]]),
    "reversed": lambda bounds: bounds.flip(0),
}
RUNS = {
    "one run short": lambda runs: runs[:-1],
    "runs reversed": lambda runs: runs.flip(0) if len(runs) > 1 else runs * 2,
    "count for length": lambda runs: runs.flip(1),
    "one segment": lambda runs: torch.tensor([[1, int(runs.prod(1).sum())]]),
    "empty segment": lambda runs: torch.cat([runs, torch.tensor([[1, 0]], dtype=runs.dtype)]),
    "halves": lambda runs: torch.stack([runs[:, 0] * 2, runs[:, 1] // 2], dim=1),
}


@pytest.mark.parametrize("kind", ["window", "frame"])
def test_segments_that_are_cut_elsewhere_are_found(windowed, kind):
    for name, change in CUTS.items():
        table = f"{kind}_bounds"
        assert faults(windowed, "cu_seqlens", **{table: change}) == {table}, name
    for name, change in RUNS.items():
        table = f"{kind}_runs"
        assert faults(windowed, **{table: change}) == {table}, name


def swapped(order):
    changed = order.clone()
    changed[[0, -1]] = changed[[-1, 0]]
    return changed


def with_first(value):
    return lambda table: torch.cat([torch.full_like(table[:1], value), table[1:]])


def test_orders_and_places_that_are_others_are_found(windowed):
    for table, change, found in (
        ("order", swapped, "order"),
        ("order", with_first(7), "order"),
        ("order", with_first(10_000), "order"),
        ("inverse", lambda table: table.argsort().int(), "order"),
        ("inverse", with_first(7), "inverse"),
        ("order", lambda table: torch.cat([table, table[:1]]), "order"),
        ("positions", lambda table: table.flip(1), "positions"),
        ("positions", lambda table: table[:-1], "positions"),
        ("frame_order", lambda table: torch.arange(len(table)), "frame_inverse"),
        ("frame_order", lambda table: torch.arange(len(table)), "frame_runs"),
    ):
        assert found in faults(windowed, **{table: change}), table


def test_equal_segments_may_come_in_any_order(windowed):
    packing, _ = windowed
    items = [item(packing, [(8, 16)])]
    tables = packing.prepare(items, "grouped")
    order = torch.cat([tables["order"][16:], tables["order"][:16]])
    inverse = order.argsort()
    changed = {"order": order, "inverse": inverse, "frame_order": inverse, "frame_inverse": order}
    assert not any(check_tables({**tables, **changed}, items, packing).values())


OTHER_ENTRIES = [
    ("grouped", "order", lambda table: torch.cat([table, table[:1]])),
    ("padded", "slice_counts_a", lambda table: table - 1),
    ("padded", "slice_cells_a", lambda table: table + 1),
    ("padded", "slice_cells_c", lambda table: table.flip(-1).roll(1, 0) + 1),
    ("padded", "slice_places", lambda table: table.flip(0)),
    ("padded", "group_counts_b", lambda table: table.clamp(max=2)),
    ("padded", "group_inverse", lambda table: table.flip(0)),
    ("cu_seqlens", "slice_bounds", lambda table: table.clamp(min=1)),
    ("cu_seqlens", "group_bounds", lambda table: table[[0, *range(2, len(table)), -1]]),
    ("cu_seqlens", "group_inverse", lambda table: table.flip(0)),
    ("cu_seqlens", "longest_slice", lambda table: table[:1]),
]


def test_tables_of_slices_with_other_entries_are_found(sliced):
    for name in ("order", "slice_runs", "group_runs", "group_inverse", "cells", "frames"):
        for change in (lambda x: x.flip(0), lambda x: x + 1, lambda x: x.roll(1, 0)):
            assert faults(sliced, **{name: change}), name
    for layout, name, change in OTHER_ENTRIES:
        assert name in faults(sliced, layout, **{name: change}), (layout, name)


def test_padded_tables_with_other_entries_are_found(windowed):
    for name in ("window_segments", "frame_places", "frame_cells_a", "frame_counts_a"):
        found = [
            faults(windowed, "padded", **{name: change}) for change in (lambda x: x.flip(0), lambda x: x - 1)
        ]
        assert name in set.union(*found), name


def test_frames_of_a_group_are_counted_once(sliced):
    packing, items = sliced
    call = Call.of(items, packing.merge)
    wanted = [packing.queried.queries * groups for groups in (3, 2, 1)]
    assert [call.num_tokens(number, packing.queried) for number in range(3)] == wanted
    assert [packing.num_tokens(each) for each in items] == wanted


@pytest.mark.seconds
def test_a_table_without_a_rule_is_reported_as_unchecked(subject_of):
    class Strange(GridPacking):
        def prepare(self, media, layout):
            tables = super().prepare(media, layout)
            return {**tables, "strange": tables["inverse"]}

    side = subject_of().packing.window_side
    recipe = replace(subject_of().recipe, packing=lambda config: Strange(config.rule, side))
    subject = replace(subject_of(), form="padded", recipe=recipe)
    with in_torch(subject) as engine:
        rows = list(Checker(engine, subject, silent).integers())
    assert [row.check for row in rows if row.verdict == "observed"] == ["strange"]
    assert {"order", "inverse", "frame_cells_a", "frame_counts_a", "patches"} <= {row.check for row in rows}
