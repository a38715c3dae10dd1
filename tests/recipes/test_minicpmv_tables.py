"""Tables of a sliced call: recorded position ids, runs, and what is refused."""

from __future__ import annotations

import pytest
import torch
from vlexport.recipes import minicpmv
from vlexport.recipes._minicpmv_reference import resized
from vlexport.recipes.minicpmv import SlicePacking, SliceRule, check_items

from tests.golden_data import cases
from vlexport.errors import InputError
from vlexport.specs import MediaItem
from vlexport.vision.attention.layout import tables as call_tables
from vlexport.vision.attention.segmentation import Segmentation
from vlexport.vision.slices import Slice, groups_of

RULE = SliceRule(patch=2, side=16, max_cells=9, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_position_ids_equal_the_recorded_ones() -> None:
    found = list(cases("minicpm_tower", "position_ids"))
    assert len(found) == 30
    for case in found:
        for row, (rows, columns) in zip(case.outputs["position_ids"], case.meta["tgt_sizes"], strict=True):
            places = places_of(rows, columns)
            if not case.meta["tgt_given"]:
                places = minicpmv.along_line(*places)
            ids = minicpmv.bucket_ids(*places, case.meta["side"])
            assert ids.tolist() == row[: rows * columns].tolist(), case.meta
            assert row[rows * columns :].abs().sum() == 0


def places_of(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells of one slice, and its sides beside each."""
    cells = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).reshape(-1, 2)
    return cells, torch.tensor([[rows, columns]]).expand(len(cells), 2)


@pytest.mark.parametrize("antialias", [False, True])
def test_resize_weights_give_the_resized_table(antialias: bool) -> None:
    torch.manual_seed(0)
    table = torch.randn(49, 5)
    sizes = [(7, 7), (3, 7), (1, 1), (12, 5), (1, 20), (20, 1), (2, 3)]
    cells, sides = map(torch.cat, zip(*(places_of(*size) for size in sizes), strict=True))
    rows_NB, columns_NB = minicpmv.resize_weights(cells, sides, 7, antialias=antialias)
    weights = (rows_NB[:, :, None] * columns_NB[:, None]).flatten(1)
    wanted = [
        resized(table, Slice(start=0, rows=rows, columns=columns, frame=-1), antialias=antialias)
        for rows, columns in sizes
    ]
    # Sums of the same sixteen products in another order: 7e-7 seen.
    torch.testing.assert_close(weights @ table, torch.cat(wanted), rtol=0, atol=3e-6)


def item_of(
    sizes: list[tuple[int, int]], groups: tuple[tuple[int, ...], ...] = (), rows: int | None = None
) -> MediaItem:
    count = sum(down * across for down, across in sizes) if rows is None else rows
    return MediaItem(
        kind="image",
        patches=torch.zeros(count, RULE.row_width),
        grid=(len(sizes), 1, 1),
        slices=tuple(sizes),
        frame_groups=groups,
    )


def test_equal_groups_make_one_run() -> None:
    sides = torch.tensor([(2, 3), (4, 4), (3, 2), (4, 4)])
    structure = {"slices": sides, "group_sizes": torch.ones(4, dtype=torch.int64)}
    kinds = [Segmentation(name="group", queries=4), Segmentation(name="slice", within="group")]
    tables = call_tables("grouped", kinds, SlicePacking.__new__(SlicePacking).segments(structure), 1)
    assert tables["slice_runs"].tolist() == [[2, 6], [2, 16]]
    assert tables["group_runs"].tolist() == [[2, 4, 6], [2, 4, 16]]
    assert tables["group_inverse"].tolist() == [0, 2, 1, 3]


def test_slices_without_any_time_are_queried_one_by_one() -> None:
    sizes = [(1, 2), (2, 2), (3, 1)]
    assert len(groups_of([item_of(sizes)])) == 3
    assert len(groups_of([item_of(sizes, ((-1, -1, -1),))])) == 3
    assert len(groups_of([item_of(sizes, ((-1, -1), (0,)))])) == 2


def test_grouping_does_not_depend_on_the_neighbours_of_an_item() -> None:
    still = item_of([(1, 2), (2, 2)], ((-1, -1),))
    timed = item_of([(1, 2), (2, 2)], ((3, 4),))
    assert [len(group) for group in groups_of([still, timed])] == [1, 1, 2]


def test_items_that_contradict_themselves_are_refused() -> None:
    plain = MediaItem(kind="image", patches=torch.zeros(3, 4, 6), grid=(1, 2, 3))
    counted = r"item 0: \d frame numbers in groups of .* given, 2 expected, one per slice and at least one"
    rows = r"item 0: patches of shape \[7, 12\] given, \[8, 12\] expected"
    pair = [(1, 2), (2, 2)]
    refusals: list[tuple[list[MediaItem], str]] = [
        ([], "no image or video given: at least one is expected"),
        ([item_of([(2, 3), (1, 2)], rows=7)], rf"{rows} for 2 slices of \[\[2, 3\], \[1, 2\]\]"),
        ([item_of([(2, 0)])], r"item 0: slices \[\[2, 0\]\] given"),
        ([plain], r"item 0: plain images of shape \[3, 4, 6\] given, rows of patches \[6, 12\] expected"),
        ([item_of(pair, ((0,),))], counted),
        ([item_of(pair, ((0, 1), (2,)))], counted),
        ([item_of(pair, ((0, 1), ()))], counted),
        ([item_of([(1, 2)], ((-2,),))], "0 or more expected, or -1 for none"),
    ]
    for items, message in refusals:
        with pytest.raises(InputError, match=message):
            check_items(items, RULE.row_width, timed=True)
