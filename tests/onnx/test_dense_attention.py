"""Attention in standard operators, in groups of heads where OpenVINO would keep much for all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.onnx.conftest import run
from vlexport.onnx import to_onnx

HEADS, LENGTH, SIZE = 6, 37, 8
# Sums in another order: 3e-7 measured on outputs of size 1.
ROUNDING = 2e-6


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None, None, :], scale=0.3)
        return mixed.transpose(1, 2).flatten(2)


def inputs_of(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 2, LENGTH, HEADS, SIZE, generator=generator).to(dtype)
    seen = torch.arange(LENGTH) < torch.tensor([[LENGTH], [20]])
    return dict(zip("qkv", rows, strict=True)) | {"seen": seen}


@pytest.mark.parametrize(
    ("dtype", "free", "groups"),
    [
        (torch.float32, True, 2),  # of four heads at most
        (torch.float32, False, 1),  # windows: one length
        (torch.bfloat16, True, 1),
    ],
)
def test_heads_are_attended_in_groups_where_their_memory_would_be_kept(
    dtype: torch.dtype, free: bool, groups: int
) -> None:
    inputs = inputs_of(dtype)
    length = {1: torch.export.Dim("length")} if free else {}
    program = torch.export.export(
        Attention(), tuple(inputs.values()), dynamic_shapes=dict.fromkeys(inputs, length)
    )
    model = to_onnx.to_onnx(program, dict.fromkeys(inputs, ()), {"out": ()}, unguarded=True)
    assert sum(node.op_type == "Softmax" for node in model.graph.all_nodes()) == groups
    if dtype == torch.float32:  # numpy has no bfloat16
        exact = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
        torch.testing.assert_close(
            run(model, inputs, "out").double(), Attention()(**exact), atol=ROUNDING, rtol=0
        )
