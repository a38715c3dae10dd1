"""Token budgets, packing, capture sizes and captured buffers."""

import random

import numpy as np
import torch

from tests.golden_data import counted
from tests.integrations.refusals import refused
from vlexport.integrations.vllm import budgets
from vlexport.integrations.vllm.budgets import BudgetOptions, VideoLimits, plan_budgets
from vlexport.runtime.packing import BudgetPlan, pack
from vlexport.vision import static_shapes

NO_VIDEO = VideoLimits(videos=0, frames=1)


def plan_of(sizes, max_items=8):
    return BudgetPlan(budgets=tuple(sizes), max_items=max_items, max_frames=0)


def test_budgets_and_batch_limits_equal_the_reference():
    for case in counted("cudagraph", "budgets", number=40):
        options = BudgetOptions(
            budgets=tuple(case.meta["user_budgets"]),
            max_items=case.meta["user_items"] or None,
            max_frames=case.meta["user_frames"],
        )
        video = VideoLimits(videos=case.meta["video_limit"], frames=case.meta["max_frames_per_video"])
        smallest, largest = case.meta["range"]
        ours = plan_budgets(smallest, largest, options, video)
        assert list(ours.budgets) == case.outputs["budgets"].tolist()
        assert (ours.max_items, ours.max_frames) == (case.meta["max_batch_size"], case.meta["max_frames"])


def test_packing_equals_the_reference():
    for case in counted("cudagraph", "packing", number=60):
        ours = pack(
            case.inputs["tokens"].tolist(), plan_of(case.meta["budgets"], case.meta["max_batch_size"])
        )
        assert [[list(batch.items), batch.budget] for batch in ours] == case.meta["batches"]


def test_capture_grids_and_baked_lengths_equal_the_reference():
    for case in counted("q25_metadata", "capture_grid", number=20):
        limits = (case.meta["max_batch_size"], case.meta["max_frames_per_batch"])
        ours = static_shapes.capture_grids(case.meta["token_budget"], *limits, merge=2)
        assert [list(grid) for grid in ours] == case.outputs["grids"].tolist()
        assert int(np.prod(ours, axis=1).sum()) == case.outputs["pixel_shape"].tolist()[0]
        # Windows of 112 pixels, patches of 14: 4 merged cells a side.
        lengths = (case.meta["max_seqlen_override"], case.meta["max_seqlen_window_override"])
        assert static_shapes.max_segment_lengths(case.meta["token_budget"], merge=2, window_side=4) == lengths


def test_window_bounds_equal_the_reference():
    for case in counted("q25_metadata", "max_window_seqs", number=30):
        side = case.meta["window_size"] // case.meta["merge"] // case.meta["patch"]
        budget, items, frames = case.meta["args"]
        assert static_shapes.max_windows(budget, items, frames, side) == int(case.outputs["n"])


def test_boundaries_are_refilled_like_the_reference():
    for case in counted("q25_metadata", "pad_cu", number=12):
        recorded = case.outputs["dst"]
        buffer = torch.full_like(recorded, -7)
        static_shapes.refill(buffer, case.inputs["src"], "repeat_last")
        assert torch.equal(buffer, recorded)


def test_slice_bounds_and_patch_grids_equal_the_reference():
    for case in counted("minicpm_tower", "patch_grid", number=24):
        keys = budgets.patch_grid_keys(case.meta["side"])
        assert [list(key) for key in keys] == case.meta["keys"]
        starts = np.cumsum([0, *case.meta["slice_counts"]])
        slices = [row for item in case.meta["indices"] for row in range(starts[item], starts[item + 1])]
        sizes = [tuple(case.meta["tgt_sizes"][row]) for row in slices]
        assert list(budgets.choose_patch_grid(keys, sizes)) == case.meta["chosen"]
        budget, items, frames = case.meta["cap_args"]
        # Version 2.5 takes no videos, so its frames do not count.
        images = items if case.meta["version"] == [2, 5] else max(items, frames)
        ours = budgets.max_slices(budget, case.meta["query_num"], images, case.meta["max_slice_num"] + 1)
        assert ours == case.meta["slices_cap"]


def test_budgets_double_and_end_at_the_largest():
    assert static_shapes.doubling(3, 20) == (3, 6, 12, 20)
    assert static_shapes.doubling(5, 20) == (5, 10, 20)
    assert static_shapes.doubling(7, 7) == (7,)


def test_packing_keeps_every_item_once_inside_its_limits():
    random_number = random.Random(0)
    for _ in range(400):
        tokens = [random_number.randint(1, 1200) for _ in range(random_number.randint(0, 15))]
        plan = plan_of(
            static_shapes.doubling(random_number.randint(1, 64), 1000), random_number.randint(1, 6)
        )
        batches = pack(tokens, plan)
        assert sorted(item for batch in batches for item in batch.items) == list(range(len(tokens)))
        for batch in batches:
            total = sum(tokens[item] for item in batch.items)
            assert batch.budget == plan.smallest_for(total)
            assert len(batch.items) <= plan.max_items
            assert batch.budget is not None or (len(batch.items) == 1 and total > 1000)


def test_outputs_come_back_in_input_order_as_copies():
    random_number = random.Random(1)
    for _ in range(100):
        tokens = [random_number.randint(1, 90) for _ in range(random_number.randint(1, 10))]
        batches = pack(tokens, plan_of((8, 16, 32, 64), 3))
        outputs = []
        for batch in batches:
            filled = [torch.full((tokens[item], 2), float(item)) for item in batch.items]
            outputs.append(torch.cat([*filled, torch.full((5, 2), torch.nan)]))
        restored = budgets.unpack(batches, outputs, tokens)
        for output in outputs:
            output.zero_()
        for item, rows in enumerate(restored):
            assert torch.equal(rows, torch.full((tokens[item], 2), float(item)))


def test_capture_grids_hold_the_budget_and_little_more():
    random_number = random.Random(2)
    for _ in range(300):
        budget, items, frames = (random_number.randint(1, high) for high in (4000, 30, 60))
        grids = static_shapes.capture_grids(budget, items, frames, merge=2)
        tokens = [t * h * w // 4 for t, h, w in grids]
        assert len(grids) == items
        assert budget <= sum(tokens) < budget + items * (1 + max(frames // items, 1))


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


def test_the_last_patch_grid_serves_slices_that_no_key_covers():
    keys = budgets.patch_grid_keys(40)
    assert keys == ((32, 32), (40, 40))
    assert budgets.choose_patch_grid(keys, [(50, 3)]) == (40, 40)
    assert budgets.choose_patch_grid(keys, []) == (32, 32)


def test_budgets_that_cannot_be_are_refused(subtests):
    for smallest, largest in ((0, 5), (-1, 4), (9, 8)):
        with refused(f"tokens {smallest} to {largest}: expected 1 <= smallest <= largest."):
            plan_budgets(smallest, largest, BudgetOptions(), NO_VIDEO)
    with refused("budgets 60 to 50: expected 1 <= smallest <= largest. A batch of max_items needs a budget"):
        plan_budgets(5, 50, BudgetOptions(max_items=60), NO_VIDEO)
    no_room = "max_items 9 is more than the smallest budget 4: every item has a token at least."
    for options, fragment in (
        ({"budgets": (16, 4), "max_items": 9}, no_room),
        ({"budgets": (4, 0)}, "budgets [4, 0]: expected token counts of 1 or more."),
        ({"max_items": 0}, "max_items 0: expected 1 or more media items per batch."),
        ({"max_frames": -1}, "max_frames -1: expected 0 or more frames per batch."),
    ):
        with subtests.test(fragment), refused(fragment):
            BudgetOptions(**options)


def test_rows_that_do_not_fit_are_refused():
    with refused("tokens per item [3, 0]: expected 1 or more for each."):
        pack([3, 0], plan_of((4,)))
    with refused("4 rows given, the buffer holds 3; use a larger budget."):
        static_shapes.refill(torch.zeros(3), torch.zeros(4), "zero")
    with refused("no boundaries given: at least the leading 0 is expected."):
        static_shapes.refill(torch.zeros(3), torch.zeros(0), "repeat_last")
    with refused("5 output rows given for items [0, 1], which have 6 tokens; pass what the engine returned"):
        budgets.unpack(pack([3, 3], plan_of((8,))), [torch.zeros(5, 2)], [3, 3])
