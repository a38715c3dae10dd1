"""Layers that vision towers are made of.   N patches, C width, H heads, D head width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlexport.vision.attention.layout import CallLayout, View
from vlexport.vision.attention.segmentation import take_cells
from vlexport.vision.rotary import in_halves, rotate

ALIGNED = 32


class PatchEmbed(nn.Module):
    """A convolution whose kernel equals its stride, under the names that checkpoints give it."""

    def __init__(self, patch_shape: tuple[int, ...], width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.proj = PatchKernel(patch_shape, width, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        rows: Tensor = self.proj(patches)
        return rows


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


class LayerNorm(nn.LayerNorm):
    """torch's norm, in float32 whatever the working dtype, in every runtime."""

    def forward(self, x_NC: Tensor) -> Tensor:
        wide = F.layer_norm(
            x_NC.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )
        return wide.to(x_NC.dtype)


class PatchKernel(nn.Module):
    """A convolution whose kernel equals its stride, as one linear layer over rows of patches."""

    def __init__(self, patch_shape: tuple[int, ...], width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, *patch_shape))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.weight.flatten(1), self.bias)


class GeluMlp(nn.Module):
    """Two linear layers around a GELU: exact, or its tanh form."""

    def __init__(self, width: int, inner: int, *, exact: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.form = "none" if exact else "tanh"

    def forward(self, x_NC: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x_NC), approximate=self.form))
        return out


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


class FusedAttention(nn.Module):
    """Self-attention from one layer; pairs are `neighbours` in the checkpoint, else halves."""

    def __init__(self, width: int, heads: int, *, neighbours: bool = False) -> None:
        super().__init__()
        self.heads, self.neighbours = heads, neighbours
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_NC: Tensor, view: View) -> Tensor:
        # Rows of one axis: `onnx/passes.py` gives each of them a product of its own.
        parts = self.qkv(x_NC).unflatten(-1, (3, self.heads, -1)).unbind(1)
        if self.neighbours:
            parts = (*map(in_halves, parts[:2]), parts[2])
        out: Tensor = self.proj(_attend(parts, view))
        return out


class SplitAttention(nn.Module):
    """Self-attention inside segments; queries, keys and values from a linear layer each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_NC: Tensor, view: View) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        parts = [layer(x_NC).unflatten(-1, (self.heads, -1)) for layer in layers]
        out: Tensor = self.out_proj(_attend(parts, view))
        return out


def _attend(parts: Sequence[Tensor], view: View) -> Tensor:
    q_NHD, k_NHD, v_NHD = parts
    if view.cos_NK is not None and view.sin_NK is not None:
        q_NHD, k_NHD = (rotate(x_NHD, view.cos_NK, view.sin_NK) for x_NHD in (q_NHD, k_NHD))
    return view.attention.attend(q_NHD, k_NHD, v_NHD, q_NHD.shape[-1] ** -0.5).flatten(1)


class Block(nn.Module):
    """Attention inside the segments of one segmentation, then an MLP; both behind a norm, both residual."""

    def __init__(
        self, segmentation: str, norms: Sequence[nn.Module], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.segmentation = segmentation
        self.norm1, self.norm2 = norms
        self.attn = attention
        self.mlp = mlp

    def forward(self, x_NC: Tensor, layout: CallLayout) -> Tensor:
        view = layout.views[self.segmentation]
        seen_NC = take_cells(self.norm1(x_NC), view.order_M, layout.unit)
        mixed_NC = self.attn(seen_NC, view)
        x_NC = x_NC + take_cells(mixed_NC, view.inverse_M, layout.unit)
        out_NC: Tensor = x_NC + self.mlp(self.norm2(x_NC))
        return out_NC


class PatchMerger(nn.Module):
    """Norm, concatenate the patches of a cell, two linear layers with exact GELU."""

    def __init__(
        self, norm: nn.Module, width: int, unit: int, out_width: int, *, norm_joined: bool = False
    ) -> None:
        super().__init__()
        self.width, self.unit, self.norm_joined = width, unit, norm_joined
        self.ln_q = norm
        self.mlp = nn.Sequential(
            nn.Linear(unit * width, unit * width), nn.GELU(), nn.Linear(unit * width, out_width)
        )

    def forward(self, x_NC: Tensor) -> Tensor:
        x_NC = x_NC if self.norm_joined else self.ln_q(x_NC)
        cells_MC = x_NC.unflatten(0, (-1, self.unit)).flatten(1)
        merged: Tensor = self.mlp(self.ln_q(cells_MC) if self.norm_joined else cells_MC)
        return merged
