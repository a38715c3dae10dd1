"""Every way in which an index table can be wrong is a finding."""

from dataclasses import replace

import pytest
import torch

from vlexport.parity.integers import unchecked_rows
from vlexport.parity.samples import SampleRules
from vlexport.parity.stored import blank
from vlexport.parity.tables import Call, check_tables
from vlexport.specs import ShapeProfile, TensorSpec
from vlexport.vision import grid
from vlexport.vision.attention import layout
from vlexport.vision.attention.segmentation import Segmentation
from vlexport.vision.grid_packing import GridPacking

GRIDS = ((1, 10, 12), (2, 4, 10), (1, 2, 2))
CALL = Call(grids=GRIDS, merge=2, window_side=4)


KINDS = (Segmentation(name="window", largest=16), Segmentation(name="frame"))


def index_tables(grids, form="grouped"):
    """Tables of a call with windows of 4 x 4 cells of 2 x 2 patches."""
    grids = torch.tensor(grids)
    found = {"window": grid.windows(grids, 2, 4), "frame": grid.frames(grids, 2)}
    made = {"positions": grid.patch_positions(grids, 2), **layout.tables(form, KINDS, found, 4)}
    return {name: table.to(torch.int32) for name, table in made.items()}


def tables():
    return index_tables(GRIDS)


def wrong(changed):
    return {finding.table for finding in check_tables({**tables(), **changed}, CALL) if finding.wrong}


def swapped(table, one, other):
    changed = table.clone()
    changed[[one, other]] = changed[[other, one]]
    return changed


def test_right_tables_have_no_faults():
    findings = check_tables(tables(), CALL)
    assert len(findings) == 7
    assert [finding.wrong for finding in findings] == [0] * 7


def test_right_bounds_have_no_faults():
    findings = check_tables(index_tables(GRIDS, "cu_seqlens"), CALL)
    assert {finding.table for finding in findings} >= {"window_bounds", "frame_bounds"}
    assert [finding.wrong for finding in findings] == [0] * 7


@pytest.mark.parametrize("name", ["window_bounds", "frame_bounds"])
@pytest.mark.parametrize(
    "change",
    [
        lambda bounds: bounds[:-1],
        lambda bounds: bounds[1:],
        lambda bounds: bounds + 4,
        lambda bounds: bounds[[0, -1]],
        lambda bounds: torch.cat([bounds, bounds[-1:]]),
        lambda bounds: bounds.flip(0),
    ],
    ids=["one short", "no leading zero", "shifted", "one segment", "empty segment", "reversed"],
)
def test_bounds_that_cut_elsewhere_are_found(name, change):
    right = index_tables(GRIDS, "cu_seqlens")
    findings = check_tables({**right, name: change(right[name])}, CALL)
    assert {finding.table for finding in findings if finding.wrong} == {name}


def test_cells_exchanged_between_windows_are_found():
    order = swapped(tables()["order"], 0, -1)
    assert {"window_runs", "inverse"} <= wrong({"order": order})


def test_a_cell_that_comes_twice_is_found():
    order = tables()["order"].clone()
    order[0] = order[1]
    assert "order" in wrong({"order": order})


def test_places_that_do_not_exist_are_found():
    order = tables()["order"].clone()
    order[0] = len(order)
    assert "order" in wrong({"order": order})


def test_an_inverse_that_is_the_order_is_found():
    assert wrong({"inverse": tables()["order"]}) == {"inverse"}


@pytest.mark.parametrize("name", ["window_runs", "frame_runs"])
@pytest.mark.parametrize(
    "change",
    [
        lambda runs: runs[:-1],
        lambda runs: runs.flip(0) if len(runs) > 1 else runs * 2,
        lambda runs: runs.flip(1),
        lambda runs: torch.tensor([[1, int(runs.prod(1).sum())]]),
        lambda runs: torch.cat([runs, torch.tensor([[1, 0]], dtype=runs.dtype)]),
        lambda runs: torch.stack([runs[:, 0] * 2, runs[:, 1] // 2], dim=1),
    ],
    ids=["one run short", "runs reversed", "count for length", "one segment", "empty segment", "halves"],
)
def test_runs_that_cut_elsewhere_are_found(name, change):
    assert wrong({name: change(tables()[name])}) == {name}


def test_swapped_axes_of_positions_are_found():
    assert wrong({"positions": tables()["positions"].flip(1)}) == {"positions"}


def test_a_frame_order_in_raster_terms_is_found():
    raster = torch.arange(len(tables()["frame_order"]), dtype=torch.int32)
    assert {"frame_runs", "frame_inverse"} <= wrong({"frame_order": raster})


def test_equal_segments_may_come_in_any_order():
    call = Call(grids=((1, 8, 16),), merge=2, window_side=4)
    made = index_tables(call.grids)
    order = torch.cat([made["order"][16:], made["order"][:16]])
    inverse = order.argsort().to(torch.int32)
    frame_order, frame_inverse = inverse, order
    changed = {
        **made,
        "order": order,
        "inverse": inverse,
        "frame_order": frame_order,
        "frame_inverse": frame_inverse,
    }
    assert [finding.wrong for finding in check_tables(changed, call)] == [0] * 7


def test_buckets_without_windows_are_checked_and_a_table_that_nothing_touches_is_said_to_be(subject_of):
    """A tower without windows in the padded layout: its own tables, and one that no check knows."""

    class Strange(GridPacking):
        def prepare(self, media, layout):
            tables = super().prepare(media, layout)
            return {**tables, "strange": tables["inverse"]}

    subject = subject_of()
    recipe = replace(subject.recipe, packing=lambda config: Strange(config.rule))
    flat = replace(subject, form="padded", recipe=recipe)
    names = [*recipe.prepare(flat.config, [blank(flat, (1, 4, 4))], "padded")]
    specs = [TensorSpec(name=name, dtype="int32", shape=(1,)) for name in names if name != "patches"]
    rules = SampleRules(
        profile=ShapeProfile("any", {}), inputs=tuple(specs), tokens=None, form="padded", max_patches=640
    )
    assert [row.check for row in unchecked_rows(flat, rules)] == ["strange"]
