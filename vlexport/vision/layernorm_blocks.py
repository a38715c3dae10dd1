"""Layers of towers with LayerNorm and a plain MLP.   N patches, C width, H heads, D head width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlexport.vision.slice_forms import Seen, SlicePlaces


class LayerNorm(nn.LayerNorm):
    """torch's norm, all of it in float32 whatever the working dtype, and said so to every runtime."""

    def forward(self, x_NC: Tensor) -> Tensor:
        wide = F.layer_norm(
            x_NC.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )
        return wide.to(x_NC.dtype)


class PatchKernel(nn.Module):
    """A convolution with bias whose kernel equals its stride, as one linear layer over rows of patches."""

    def __init__(self, patch_shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, *patch_shape))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.weight.flatten(1), self.bias)


class FusedSegmentAttention(nn.Module):
    """Self-attention inside slices; queries, keys and values from one linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_NC: Tensor, slices: Seen) -> Tensor:
        out: Tensor = self.proj(_attend(self.qkv(x_NC).chunk(3, dim=-1), slices, self.heads))
        return out


class SplitSegmentAttention(nn.Module):
    """Self-attention inside slices; queries, keys and values from a linear layer each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_NC: Tensor, slices: Seen) -> Tensor:
        parts = self.q_proj(x_NC), self.k_proj(x_NC), self.v_proj(x_NC)
        out: Tensor = self.out_proj(_attend(parts, slices, self.heads))
        return out


def _attend(parts: Sequence[Tensor], slices: Seen, heads: int) -> Tensor:
    q_NHD, k_NHD, v_NHD = (part_NC.unflatten(-1, (heads, -1)) for part_NC in parts)
    return slices.attend(q_NHD, k_NHD, v_NHD, q_NHD.shape[-1] ** -0.5).flatten(1)


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


class SegmentLayout(Protocol):
    """What blocks have to know of a call."""

    @property
    def places(self) -> SlicePlaces: ...


class SegmentBlock(nn.Module):
    """Attention inside segments, then an MLP; both behind a LayerNorm, both residual."""

    def __init__(self, width: int, eps: float, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = (LayerNorm(width, eps=eps) for _ in range(2))
        self.attn = attention
        self.mlp = mlp

    def forward(self, x_NC: Tensor, layout: SegmentLayout) -> Tensor:
        x_NC = x_NC + self.attn(self.norm1(x_NC), layout.places.slices)
        out_NC: Tensor = x_NC + self.mlp(self.norm2(x_NC))
        return out_NC
