"""Which tokens EVS keeps: recorded counts and masks, the rules for ties and NaN, refused inputs."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.golden_data import cases
from tests.pruning.masks import EVS_SNAP, retention_mask
from vlexport.errors import InputError
from vlexport.pruning.evs import EVS, EvsSelector, prune
from vlexport.pruning.selectors import MAX_WIDTH, eager
from vlexport.pruning.vidcom2 import VidCom2Selector

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKS = list(enumerate(cases("evs_mask")))
# The recorded masks with NaN show a defect of their source. Where the last kept and the first dropped token
# are an ulp apart, the order of a sum decides; a gap of 0 is a tie, which the rule settles.
COMPARABLE = [
    (number, case)
    for number, case in MASKS
    if case.meta["nan_count"] == 0 and (case.meta["cut_gap"] in (0, None) or case.meta["cut_gap"] > 1e-5)
]
WITH_NAN = [(number, case) for number, case in MASKS if case.meta["nan_count"]]
# Half a step is the rounding itself; the rest is what rounding rows to whole numbers moves. Measured over
# 64 x 3 rows of each width: at most 0.90 steps up to width 64, 1.07 up to 20480.
MOST_STEPS_OFF = 1.5
retained_count = EvsSelector().retained_count


def video(frames, per_frame, width, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(frames * per_frame, width, generator=generator).to(dtype)


def mask_of(case, selection=EVS):
    grid = tuple(case.meta["thw"])
    return retention_mask(case.inputs["embeds"], grid, case.meta["merge"], case.meta["q"], selection)


def test_counts_equal_the_recorded_ones():
    case = next(cases("evs_count"))
    names = ("tokens_per_frame", "num_frames", "q")
    rows = zip(*(case.inputs[name].tolist() for name in names), case.outputs["evs"].tolist(), strict=True)
    assert [row for row in rows if retained_count(*row[:3]) != row[3]] == []


def test_masks_equal_the_recorded_ones():
    assert (len(COMPARABLE), len(WITH_NAN)) == (68, 3)
    differing = [n for n, case in COMPARABLE if not torch.equal(mask_of(case), case.outputs["mask"])]
    assert differing == []


def test_where_the_record_has_nan_the_first_frame_stays_whole():
    for (number, case), selection in product(WITH_NAN, (EVS, EVS_SNAP)):
        frames, height, width = case.meta["thw"]
        per_frame = height * width // case.meta["merge"] ** 2
        mask = mask_of(case, selection)
        assert mask[:per_frame].all(), number
        assert int(mask.sum()) == retained_count(per_frame, frames, case.meta["q"]), number


def test_zero_vectors_and_rows_that_are_not_finite_count_as_dissimilar_by_one():
    zero = video(2, 3, 8, torch.float16)
    zero[4] = 0
    given: list[tuple[Any, torch.Tensor]] = [("exact", zero)]
    for dtype, bad in product(DTYPES, (math.inf, math.nan)):
        given.append(("snap", video(2, 3, 8, dtype)))
        given[-1][1][4, 2] = bad
    for ties, embeds in given:
        scores = EvsSelector(ties=ties).scores(embeds.view(2, 3, 8), torch.tensor(0.5))
        assert scores[1, 1] == 1, embeds[4]
        assert not scores.isnan().any(), embeds[4]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 24),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(DTYPES),
    st.sampled_from(["exact", "snap"]),
    st.integers(0, 10**6),
)
def test_kept_tokens_ascend_are_as_many_as_counted_and_hold_the_first_frame(
    frames, per_frame, width, rate, dtype, ties, seed
):
    embeds = video(frames, per_frame, width, dtype, seed)
    embeds[::3] = 0
    pruned = prune(embeds, (frames, 1, per_frame), 1, rate, EVS if ties == "exact" else EVS_SNAP)
    assert pruned.kept.dtype == torch.int64
    assert len(pruned.kept) == (retained_count(per_frame, frames, rate) if rate else len(embeds))
    assert (pruned.kept.diff() > 0).all()
    assert pruned.kept[:per_frame].tolist() == list(range(per_frame))
    assert torch.equal(pruned.embeds, embeds[pruned.kept])


def test_without_a_rate_or_with_one_frame_the_same_tensor_comes_back():
    embeds = video(3, 4, 8)
    for rate in (None, 0, 0.0):
        pruned = prune(embeds, (3, 4, 4), 2, rate)
        assert pruned.embeds is embeds
        assert pruned.kept.tolist() == list(range(12))
    embeds = video(1, 4, 8)
    assert prune(embeds, (1, 4, 4), 2, 0.9).embeds is embeds


def test_what_moves_is_kept_before_what_stands_still_and_the_earliest_where_nothing_moves():
    for dtype in DTYPES:
        # The exact rule sees the last bit of each token's own norm here.
        embeds = video(1, 9, 64, dtype).repeat(4, 1)
        assert prune(embeds, (4, 6, 6), 2, 0.5, EVS_SNAP).kept.tolist() == list(range(18))
    embeds = video(1, 9, 64).repeat(4, 1)
    embeds[[13, 14, 32]] = video(1, 3, 64, seed=5)
    for selection in (EVS, EVS_SNAP):
        kept = prune(embeds, (4, 6, 6), 2, 0.6, selection).kept
        # 13 and 14 change in frame 1 and change back in frame 2; 32 changes in frame 3.
        assert kept.tolist() == [*range(9), 13, 14, 22, 23, 32]


@pytest.mark.parametrize(("width", "dtype"), zip([1, 3, 64, 2048, 20480], [*DTYPES, *DTYPES], strict=False))
def test_snapped_scores_are_steps_of_a_1024th_near_the_cosine(width, dtype):
    embeds = video(4, 48, width, dtype) + 0.5 * video(1, 48, width, dtype, seed=1).repeat(4, 1)
    scores = EvsSelector(ties="snap").scores(embeds.view(4, 48, width), torch.tensor(0.5))
    wide = embeds.double().view(4, 48, width)
    cosine = torch.nn.functional.cosine_similarity(wide[1:], wide[:-1], dim=-1)
    steps = scores[1:] * 1024
    assert torch.equal(steps, steps.round())
    assert ((steps.double() - 1024 * (1 - cosine)).abs() <= MOST_STEPS_OFF).all()


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.75])
def test_both_rules_agree_where_the_cut_is_clear(rate):
    # Tokens drift by 0 or 2 against a norm of 8: dissimilarities below 0.001 or above 0.02.
    generator = torch.Generator().manual_seed(2)
    moving = torch.rand(6, 20, 1, generator=generator).argsort(0) < 6 * (1 - rate)
    base = torch.randn(1, 20, 64, generator=generator).expand(6, 20, 64).clone()
    walk = (torch.randn(6, 20, 64, generator=generator) * moving * 0.5).cumsum(0)
    scores = EvsSelector().scores(base + walk, torch.tensor(0.5)).flatten()
    for selection in (EVS, EVS_SNAP):
        kept = prune((base + walk).flatten(0, 1), (6, 4, 5), 1, rate, selection).kept
        dropped = torch.ones(120, dtype=torch.bool).index_fill(0, kept, False)
        assert scores[kept].min() >= scores[dropped].max() - 2 / 1024


def refused(words):
    return pytest.raises(InputError, match=words)


def test_rates_and_counts_that_mean_nothing_are_refused():
    for rate in (-0.1, 1.0, 1.5, math.nan):
        with refused(r"pruning rate .*: expected 0 <= rate < 1"):
            prune(video(2, 4, 8), (2, 4, 4), 2, rate)
        with refused(r"pruning rate .*: expected 0 <= rate < 1"):
            retained_count(4, 2, rate)
    with refused("ties 'round': expected 'exact' or 'snap'"):
        EvsSelector(ties="round")  # type: ignore[arg-type]
    with refused("0 frames of 4 tokens: expected at least one of each"):
        retained_count(4, 0, 0.5)


def test_grids_and_rows_that_do_not_match_are_refused():
    with refused(r"7 rows given, 8 expected for grid \(2, 4, 4\) with merge size 2 \(2 frames of 4 tokens\)"):
        prune(video(1, 7, 8), (2, 4, 4), 2, 0.5)
    with refused(r"5 x 4 patches do not divide by the merge size 2"):
        prune(video(2, 5, 8), (2, 5, 4), 2, 0.5)
    for grid, merge in (((0, 4, 4), 2), ((2, 0, 4), 2), ((2, 4, 4), 0)):
        with refused("each at least 1, and a merge size of at least 1"):
            prune(video(2, 4, 8), grid, merge, 0.5)
    with refused(r"shape \[2, 4, 8\] given, \[tokens, width\] expected"):
        prune(video(2, 4, 8).view(2, 4, 8), (2, 4, 4), 2, 0.5)
    for dtype in (torch.int64, torch.float64):
        with refused(rf"{dtype} given; expected the tower's own output"):
            prune(torch.ones(8, 8, dtype=dtype), (2, 4, 4), 2, 0.5)
    with refused(f"width 0 given, 1 to {MAX_WIDTH} expected"):
        prune(torch.ones(8, 0), (2, 4, 4), 2, 0.5)


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
