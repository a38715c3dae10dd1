"""Two-axis rotary embedding.   N patches, H heads, D head width, K = D / 2 angles."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return `theta^(-2j / (D/2))` for j < D/4, float32: transformers' formula and operators, on the CPU.

    A tower keeps it as a constant: computed while tracing, it would be folded by another `pow` than torch's,
    two steps of float32 away.
    """
    half = head_dim // 2
    return 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half)


def angles(positions_N2: Tensor, inv_freq: Tensor) -> Tensor:
    """Return row angles, then column angles, of each patch: [N, K] in float32."""
    return (positions_N2.float()[:, :, None] * inv_freq).flatten(1)


def rotate(x_NHD: Tensor, cos_NK: Tensor, sin_NK: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) of each head in float32; the result has the input's dtype."""
    first, second = x_NHD.float().chunk(2, dim=-1)
    cos, sin = cos_NK[:, None], sin_NK[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_NHD.dtype)


def in_halves(x_NHD: Tensor) -> Tensor:
    """Bring heads whose pairs are neighbours into the order that `rotate` turns; products of q and k stay."""
    halves_NHD: Tensor = x_NHD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves_NHD
