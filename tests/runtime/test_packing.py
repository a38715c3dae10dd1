"""Packing into budgets, bounds of windows, and captured buffers."""

import random
import re

import pytest
import torch

from tests.devices import GPU, stand_in
from tests.golden_data import cases
from vlexport.errors import InputError
from vlexport.runtime.encoder import budget_of, pack
from vlexport.vision import static_shapes


def test_packing_equals_the_reference():
    found = list(cases("cudagraph", "packing"))
    assert len(found) == 60
    for case in found:
        tokens, budgets = case.inputs["tokens"].tolist(), case.meta["budgets"]
        ours = pack(tokens, budgets, case.meta["max_batch_size"])
        totals = [sum(tokens[item] for item in batch) for batch in ours]
        assert [
            [batch, budget_of(total, budgets)] for batch, total in zip(ours, totals, strict=True)
        ] == case.meta["batches"]


def test_window_bounds_equal_the_reference():
    found = list(cases("q25_metadata", "max_window_seqs"))
    assert len(found) == 30
    for case in found:
        side = case.meta["window_size"] // case.meta["merge"] // case.meta["patch"]
        budget, items, frames = case.meta["args"]
        assert static_shapes.max_windows(budget, items, frames, side) == int(case.outputs["n"])


def test_boundaries_are_refilled_like_the_reference():
    found = list(cases("q25_metadata", "pad_cu"))
    assert len(found) == 12
    for case in found:
        recorded = case.outputs["dst"]
        buffer = torch.full_like(recorded, -7)
        static_shapes.refill(buffer, case.inputs["src"], "repeat_last")
        assert torch.equal(buffer, recorded)


def test_budgets_double_and_end_at_the_largest():
    assert static_shapes.doubling(3, 20) == (3, 6, 12, 20)
    assert static_shapes.doubling(5, 20) == (5, 10, 20)
    assert static_shapes.doubling(7, 7) == (7,)


def test_packing_keeps_every_item_once_inside_its_limits():
    random_number = random.Random(0)
    for _ in range(400):
        tokens = [random_number.randint(1, 1200) for _ in range(random_number.randint(0, 15))]
        budgets = static_shapes.doubling(random_number.randint(1, 64), 1000)
        max_items = random_number.randint(1, 6)
        batches = pack(tokens, budgets, max_items)
        assert sorted(item for batch in batches for item in batch) == list(range(len(tokens)))
        for batch in batches:
            total = sum(tokens[item] for item in batch)
            assert len(batch) <= max_items
            assert budget_of(total, budgets) is not None or (len(batch) == 1 and total > 1000)


def test_a_window_bound_covers_every_frame_shape():
    random_number = random.Random(3)
    for _ in range(2000):
        shapes = [[random_number.randint(1, high) for high in (4, 30, 30)] for _ in range(3)]
        tokens = sum(t * rows * columns for t, rows, columns in shapes)
        found = sum(t * -(-rows // 4) * -(-columns // 4) for t, rows, columns in shapes)
        assert found <= static_shapes.max_windows(tokens, 3, sum(shape[0] for shape in shapes), 4)


def test_buffers_are_padded_with_zeros_or_left_alone():
    buffer = torch.full((4, 2), 9.0)
    static_shapes.refill(buffer, None, "zero")
    assert torch.equal(buffer, torch.full((4, 2), 9.0))
    static_shapes.refill(buffer, torch.ones(3, 2), "zero")
    assert buffer.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    scalar = torch.tensor(3)
    static_shapes.refill(scalar, torch.tensor(8), "zero")
    assert int(scalar) == 8


@pytest.mark.parametrize(("smallest", "largest"), [(0, 5), (-1, 4), (9, 8)])
def test_an_impossible_range_is_refused(smallest, largest):
    with refused(f"budgets {smallest} to {largest}: expected 1 <= smallest <= largest."):
        static_shapes.doubling(smallest, largest)


def refused(fragment):
    return pytest.raises(InputError, match=re.escape(fragment))


def test_rows_that_do_not_fit_are_refused():
    with refused("4 rows given, the buffer holds 3; use a larger budget."):
        static_shapes.refill(torch.zeros(3), torch.zeros(4), "zero")
    with refused("no boundaries given: at least the leading 0 is expected."):
        static_shapes.refill(torch.zeros(3), torch.zeros(0), "repeat_last")


def test_equal_rows_of_one_memory_reach_a_device():
    with stand_in():
        moved = static_shapes.to_device(torch.arange(3).expand(3, 3), GPU)
    assert (moved.device, moved.tolist()) == (GPU, [[0, 1, 2]] * 3)
