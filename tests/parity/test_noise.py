"""Floors are measured in float64 and in the engine's dtype, and types inside a tower are watched."""

import pytest
import torch
from torch import nn

from vlexport.parity.exact import check_dtypes
from vlexport.parity.noise import StayWide, steady_arithmetic


def test_what_a_model_casts_to_float32_stays_float64_inside():
    value = torch.ones(2, dtype=torch.float64)
    with StayWide():
        made = [
            value.float(),
            value.to(torch.float32),
            value.to(dtype=torch.float32),
            value.type(torch.float32),
        ]
        made.append(torch.arange(2, dtype=torch.float32))
        made.append(torch.softmax(value, dim=0, dtype=torch.float32))
    assert {tensor.dtype for tensor in made} == {torch.float64}
    assert value.float().dtype == torch.float32


def test_arithmetic_is_steady_inside_and_as_before_outside():
    torch.set_float32_matmul_precision("high")
    try:
        with steady_arithmetic():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


class Turned(nn.Module):
    """Angles in float32, rounded to the rows' dtype or not."""

    def __init__(self, *, rounded):
        super().__init__()
        self.rounded = rounded

    def forward(self, inputs):
        table = inputs["places"].float().cos()[:, None]
        if self.rounded:
            table = table.to(inputs["rows"].dtype)
        return {"out": (inputs["rows"] * table).to(inputs["rows"].dtype)}


class Normed(nn.Module):
    """A norm with its statistics in float32 or in the rows' dtype."""

    def __init__(self, *, wide):
        super().__init__()
        self.wide = wide

    def forward(self, inputs):
        rows = inputs["rows"].float() if self.wide else inputs["rows"]
        return {"out": (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True))).to(inputs["rows"].dtype)}


INPUTS = {"rows": torch.ones(3, 4, dtype=torch.bfloat16), "places": torch.arange(3)}


@pytest.mark.parametrize(
    ("tower", "wrong"),
    [
        (Turned(rounded=False), ""),
        (Turned(rounded=True), "rows turned by a rounded table of angles"),
        (Normed(wide=True), ""),
        (Normed(wide=False), "pow in bfloat16"),
    ],
    ids=["angles wide", "angles rounded", "norm wide", "norm in half"],
)
def test_operations_that_leave_float32_too_early_are_named(tower, wrong):
    assert check_dtypes(tower, INPUTS) == {"types": wrong}
