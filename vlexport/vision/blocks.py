"""Layers that vision towers are made of.   N patches, C width, H heads, D head width."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlexport.vision.rotary import rotate

ALIGNED = 32


class PatchEmbed(nn.Module):
    """A convolution whose kernel equals its stride, run as one linear layer over flattened patches."""

    def __init__(self, patch_shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.proj = _Kernel(torch.empty(width, *patch_shape))

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1))


class _Kernel(nn.Module):
    """A convolution's weight under the name that checkpoints give it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm; statistics in float32 whatever the working dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x_NC: Tensor) -> Tensor:
        wide = x_NC.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x_NC.dtype)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, all with bias."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner)
        self.up_proj = nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, width)

    def forward(self, x_NC: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(F.silu(self.gate_proj(x_NC)) * self.up_proj(x_NC))
        return hidden

    def align(self) -> None:
        """Fill the inner width up with zeros to a multiple of `ALIGNED`; no result changes.

        The 3420 of the released towers costs MKL a third of its speed in both products (137 against
        189 GFLOP/s), and half-precision rows of 3420 start off the 16 bytes that tensor cores want.
        """
        missing = -self.gate_proj.out_features % ALIGNED
        for layer in (self.gate_proj, self.up_proj):
            layer.weight = nn.Parameter(F.pad(layer.weight.data, (0, 0, 0, missing)), requires_grad=False)
            layer.bias = nn.Parameter(F.pad(layer.bias.data, (0, missing)), requires_grad=False)
            layer.out_features += missing
        down = self.down_proj
        down.weight = nn.Parameter(F.pad(down.weight.data, (0, missing)), requires_grad=False)
        down.in_features += missing


class Places(Protocol):
    """What an attention layer has to know of a call: rotary tables of its rows, and who attends to whom."""

    @property
    def cos_NK(self) -> Tensor: ...

    @property
    def sin_NK(self) -> Tensor: ...

    def attend(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, scale: float) -> Tensor: ...


class RotarySegmentAttention(nn.Module):
    """Fused-projection self-attention with rotary positions, inside segments."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_NC: Tensor, places: Places) -> Tensor:
        q, k, v = self.qkv(x_NC).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = rotate(q, places.cos_NK, places.sin_NK), rotate(k, places.cos_NK, places.sin_NK)
        mixed_NHD = places.attend(q, k, v, self.scale)
        out: Tensor = self.proj(mixed_NHD.flatten(1))
        return out


class PatchMerger(nn.Module):
    """Norm, concatenate the patches of a cell, two linear layers with exact GELU."""

    def __init__(self, width: int, unit: int, out_width: int, eps: float) -> None:
        super().__init__()
        self.unit = unit
        self.ln_q = RMSNorm(width, eps)
        self.mlp = nn.Sequential(
            nn.Linear(unit * width, unit * width), nn.GELU(), nn.Linear(unit * width, out_width)
        )

    def forward(self, x_NC: Tensor) -> Tensor:
        merged: Tensor = self.mlp(self.ln_q(x_NC).unflatten(0, (-1, self.unit)).flatten(1))
        return merged
