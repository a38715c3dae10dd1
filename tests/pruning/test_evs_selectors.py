"""Other rules behind the same seam, and what the pruning of a video does to its packed rows."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.golden_data import cases
from tests.pruning.masks import EVS_SNAP, retention_mask
from vlexport.errors import InputError
from vlexport.pruning.evs import EVS, prune
from vlexport.pruning.selectors import eager
from vlexport.pruning.vidcom2 import VidCom2Selector

VIDCOM2 = eager(VidCom2Selector())


def test_vidcom2_counts_equal_the_recorded_ones():
    case = next(cases("evs_count"))
    names = ("tokens_per_frame", "num_frames", "q")
    rows = zip(*(case.inputs[name].tolist() for name in names), case.outputs["vidcom2"].tolist(), strict=True)
    count = VidCom2Selector().retained_count
    assert [row for row in rows if count(*row[:3]) != row[3]] == []


def test_vidcom2_masks_equal_the_recorded_ones():
    found = list(cases("vidcom2_mask"))
    assert len(found) == 12
    for case in found:
        grid, merge, rate = tuple(case.meta["thw"]), case.meta["merge"], case.meta["q"]
        mask = retention_mask(case.inputs["embeds"], grid, merge, rate, VIDCOM2)
        assert torch.equal(mask, case.outputs["mask"]), case.meta


def test_vidcom2_keeps_at_least_one_token_of_every_frame():
    generator = torch.Generator().manual_seed(0)
    kept = prune(torch.randn(60, 16, generator=generator), (6, 2, 5), 1, 0.97, VIDCOM2).kept
    assert (kept // 10).tolist() == list(range(6))


@pytest.mark.parametrize("selection", [EVS, EVS_SNAP, VIDCOM2], ids=["exact", "snap", "vidcom2"])
def test_pruning_reads_nothing_back_from_the_device(selection):
    # Tensors without data raise at any value that the host reads, so this would sync, or break a capture.
    with FakeTensorMode(allow_non_fake_inputs=False):
        pruned = prune(torch.empty(96, 32, dtype=torch.bfloat16), (4, 4, 6), 1, 0.6, selection)
    assert (pruned.embeds.shape, pruned.kept.shape) == ((38, 32), (38,))


def test_vidcom2_refuses_to_count_no_tokens():
    with pytest.raises(InputError, match="2 frames of 0 tokens: expected at least one of each"):
        VidCom2Selector().retained_count(0, 2, 0.5)


def test_kept_rows_are_those_of_the_recorded_postprocessing():
    found = list(cases("evs_postprocess", "video"))
    assert len(found) == 30
    for case in found:
        for number, grid in enumerate(case.meta["grids"]):
            embeds, recorded = case.inputs[f"embeds{number}"], case.outputs[f"out{number}"]
            pruned = prune(embeds, tuple(grid), case.meta["merge"], case.meta["q"])
            assert torch.equal(pruned.embeds, recorded[:, : embeds.shape[1]]), case.meta
