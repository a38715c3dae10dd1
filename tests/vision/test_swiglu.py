"""The gated unit, filled up with zeros: the same numbers, and nothing to do where the width fits."""

import pytest
import torch

from vlexport.vision.blocks import ALIGNED, SwiGLU


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
