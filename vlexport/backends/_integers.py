"""Linear layers of blocks in integers of 8 bits, as modules of torch.   N rows, O outputs, C columns."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vlexport.onnx.quantize import LARGEST, integers_of


class _Stored(nn.Module):
    """A matrix as integers, and the size of a step for each output."""

    int8: Tensor
    scale: Tensor

    def __init__(self, weight_OC: Tensor) -> None:
        super().__init__()
        integers_OC, scale_O = map(torch.from_numpy, integers_of(weight_OC.float().numpy()))
        self.register_buffer("int8", integers_OC)
        self.register_buffer("scale", scale_O)


class IntegerLinear(nn.Module):
    """Rows are rounded with one scale for each, products summed in 32 bits, then scaled."""

    def __init__(self, layer: nn.Linear, weight_OC: Tensor) -> None:
        super().__init__()
        self.weight = _Stored(weight_OC)
        self.bias: Tensor | None = layer.bias

    def forward(self, rows: Tensor) -> Tensor:
        rows_NC = rows.reshape(-1, rows.shape[-1]).float()
        # A row of zeros is zero steps of any size but zero.
        step_N1 = (rows_NC.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(1e-37)
        steps_NC = (rows_NC / step_N1).round().to(torch.int8)
        sums_NO = torch._int_mm(steps_NC, self.weight.int8.T)  # noqa: SLF001  there is no other
        scaled_NO = sums_NO.float() * step_N1 * self.weight.scale
        biased_NO = scaled_NO if self.bias is None else scaled_NO + self.bias
        return biased_NO.to(rows.dtype).reshape(*rows.shape[:-1], -1)


def in_integers(tower: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Put integers in the place of linear layers with these weights; return the names of those."""
    names = []
    for name, weight in weights:
        path = name.removesuffix(".weight")
        layer = tower.get_submodule(path)
        if isinstance(layer, nn.Linear):
            # Some layers are wider than what the checkpoint has, with zeros.
            whole = torch.zeros(layer.weight.shape)
            whole[tuple(slice(size) for size in weight.shape)] = weight
            tower.set_submodule(path, IntegerLinear(layer, whole))
            names.append(name)
    return names
