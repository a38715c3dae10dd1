"""Resamplers of all releases against recorded outputs, key positions against loops; the gated unit."""

import math

import pytest
import torch
from vlexport.recipes import minicpmv

from tests.golden_data import cases
from vlexport.specs import MediaItem
from vlexport.vision.attention.grouped import GroupedAttention
from vlexport.vision.blocks import ALIGNED, SwiGLU
from vlexport.vision.resampler import Resampler, grid_waves, resized_places, time_waves, wave_frequencies
from vlexport.vision.slices import groups_of

# Largest difference seen over all recorded cases: 8.4e-7.
TOLERANCE = 1e-5
RECORDED = [case for case in cases("resamplers") if case.meta["kind"] != "sincos"]
FRAMED = [case for case in RECORDED if case.meta.get("temporal_ids")]


def loaded(case):
    meta = case.meta
    weights = {name[2:]: value for name, value in case.inputs.items() if name.startswith("w:")}
    module = Resampler(
        (meta["kv"], meta["embed"]), len(weights["query"]), meta["heads"], learned_table=meta["kind"] == "r2"
    )
    module.load_state_dict(weights, strict=True)
    return module.eval()


def item_of(case):
    """All slices of a case as one item; its rows are keys, so no patches are needed."""
    sizes, batch = case.meta["tgt"], case.inputs["x"].shape[0]
    sizes = [sizes] * batch if isinstance(sizes[0], int) else sizes
    return MediaItem(
        kind="image",
        patches=torch.empty(0),
        grid=(batch, *sizes[-1]),
        slices=tuple(map(tuple, sizes)),
        frame_groups=tuple(map(tuple, case.meta.get("temporal_ids") or ())),
    )


@torch.inference_mode()
def resampled(case, module):
    item = item_of(case)
    groups = groups_of([item])
    padded = case.inputs["x"]
    rows = torch.cat([padded[i, : r * c] for i, (r, c) in enumerate(item.slices)])
    grids = [torch.cartesian_prod(torch.arange(r), torch.arange(c)) for r, c in item.slices]
    cells = torch.cat([each.reshape(-1, 2) for each in grids])
    frames = torch.cat([torch.full((each.length,), each.frame) for group in groups for each in group])
    queries = module.query.shape[0]
    if module.pos_embed is None:
        width = module.query.shape[1]
        places = grid_waves(cells, wave_frequencies(width // 2))
        places = places + time_waves(frames, wave_frequencies(width))
    else:
        sides = torch.cat([torch.tensor([[r, c]]).expand(r * c, 2) for r, c in item.slices])
        rows_NB, columns_NB = minicpmv.resize_weights(cells, sides, math.isqrt(queries), antialias=False)
        places = resized_places(rows_NB, columns_NB, module.pos_embed)
    runs = torch.tensor([[1, queries, sum(each.length for each in group)] for group in groups])
    tokens = module(rows, places, GroupedAttention(runs, len(groups)))
    return tokens.unflatten(0, (len(groups), queries))


def test_tokens_equal_the_recorded_ones():
    found = [case for case in RECORDED if not case.meta["error"]]
    assert len(found) == 18
    for case in found:
        torch.testing.assert_close(resampled(case, loaded(case)), case.outputs["out"], rtol=0, atol=TOLERANCE)


def frame_loop(frame, width):
    """The published rule, number by number."""
    half = width // 2
    angles = [frame / 10000 ** (k / half) for k in range(half)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])


def test_frame_numbers_beyond_the_recorded_table_follow_the_rule():
    """The recorded failures all need frames at or beyond the old table."""
    failed = [case for case in FRAMED if case.meta["error"]]
    assert [max(map(max, case.meta["temporal_ids"])) for case in failed] == [65, 66, 80]
    frames = [0, 1, 63, 64, 65, 66, 80, 200]
    expected = torch.stack([frame_loop(frame, 32) for frame in frames])
    torch.testing.assert_close(
        time_waves(torch.tensor(frames), wave_frequencies(32)), expected, rtol=0, atol=TOLERANCE
    )
    for case in failed:
        assert resampled(case, loaded(case)).isfinite().all()


def test_grid_positions_equal_the_recorded_tables():
    recorded = next(cases("resamplers", "sincos")).outputs
    cells = torch.cartesian_prod(torch.arange(3), torch.arange(5))
    torch.testing.assert_close(
        grid_waves(cells, wave_frequencies(8)), recorded["table"].flatten(0, 1), rtol=0, atol=1e-6
    )
    square = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    torch.testing.assert_close(
        grid_waves(square, wave_frequencies(8)), recorded["table20"], rtol=0, atol=1e-6
    )


def test_grids_beyond_seventy_patches_have_positions_of_their_own():
    waves = grid_waves(torch.tensor([[69, 0], [70, 0], [71, 0], [200, 3]]), wave_frequencies(16))
    assert torch.unique(waves, dim=0).shape[0] == 4


def test_no_frame_adds_nothing():
    assert time_waves(torch.tensor([-1]), wave_frequencies(32)).abs().max() == 0
    assert time_waves(torch.tensor([0]), wave_frequencies(32))[0, 16:].tolist() == [1.0] * 16


@pytest.mark.parametrize("inner", [1, 3420])
def test_zeros_change_no_result(inner):
    torch.manual_seed(0)
    unit, rows = SwiGLU(20, inner).double(), torch.randn(7, 20, dtype=torch.float64)
    with torch.no_grad():
        before = unit(rows)
        unit.align()
        after = unit(rows)
    assert unit.gate_proj.weight.shape[0] == unit.down_proj.weight.shape[1]
    assert unit.gate_proj.weight.shape[0] % ALIGNED == 0
    assert unit.gate_proj.weight.shape[0] - inner < ALIGNED
    torch.testing.assert_close(after, before, rtol=1e-13, atol=1e-15)


def test_a_width_that_fits_stays_as_it_is():
    unit = SwiGLU(20, 2 * ALIGNED)
    weights = unit.state_dict()
    unit.align()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in unit.state_dict().items())
