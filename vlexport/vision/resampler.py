"""A fixed number of learned queries per group of slices, cross-attending to the group's patches.

N patches of a call, G groups, Q queries, E width, H heads, D head width, R runs, B sides of a table.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlexport.vision.attention.layout import CrossAttention
from vlexport.vision.blocks import LayerNorm

EPS = 1e-6


class Resampler(nn.Module):
    """Queries to tokens: attention over projected patches, a norm and a last matrix.

    Positions are added to the keys only. With a learned table the queries have their places in it too.
    """

    def __init__(self, widths: tuple[int, int], queries: int, heads: int, *, learned_table: bool) -> None:
        super().__init__()
        patch_width, width = widths
        self.query = nn.Parameter(torch.empty(queries, width))
        self.proj = nn.Parameter(torch.empty(width, width))
        self.kv_proj = nn.Identity() if patch_width == width else nn.Linear(patch_width, width, bias=False)
        self.ln_q, self.ln_kv, self.ln_post = (LayerNorm(width, eps=EPS) for _ in range(3))
        self.attn = GroupAttention(width, heads)
        self.pos_embed = nn.Parameter(torch.empty(queries, width)) if learned_table else None

    def forward(self, x_NC: Tensor, positions_NE: Tensor, groups: CrossAttention) -> Tensor:
        values_NE = self.ln_kv(self.kv_proj(x_NC))
        query_QE = self.ln_q(self.query)
        if self.pos_embed is not None:
            query_QE = query_QE + self.pos_embed
        keys_NE = values_NE + positions_NE.to(values_NE.dtype)
        mixed_PE = self.attn(query_QE, keys_NE, values_NE, groups)
        tokens: Tensor = self.ln_post(mixed_PE) @ self.proj
        return tokens


class GroupAttention(nn.Module):
    """Multi-head attention with torch's own weight names; the same queries for every group."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)
        self.heads = heads
        self.scale = (width // heads) ** -0.5

    def forward(self, query_QE: Tensor, keys_NE: Tensor, values_NE: Tensor, groups: CrossAttention) -> Tensor:
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q_QHD, k_NHD, v_NHD = (
            F.linear(rows, weight, bias).unflatten(-1, (self.heads, -1))
            for rows, weight, bias in zip((query_QE, keys_NE, values_NE), weights, biases, strict=True)
        )
        mixed_PHD = groups.cross_attend(q_QHD, k_NHD, v_NHD, self.scale)
        out: Tensor = self.out_proj(mixed_PHD.flatten(1))
        return out


def wave_frequencies(width: int) -> Tensor:
    """Return what places are multiplied by for waves of this width, in the releases' own numpy.

    A tower keeps them as a constant: folded in a graph, another `pow` gives other float32.
    """
    half = np.float32(width // 2)
    omega = 1 / np.float32(10000) ** (np.arange(half, dtype=np.float32) / half)
    return torch.tensor(omega.tolist(), device="cpu")


def grid_waves(cell_N2: Tensor, frequencies_F: Tensor) -> Tensor:
    """Return sines and cosines of places (row, column): [N, 4F], the column's half first."""
    row_NE, column_NE = (_waves(cell_N2[:, axis], frequencies_F) for axis in (0, 1))
    return torch.cat([column_NE, row_NE], dim=-1)


def time_waves(frame_N: Tensor, frequencies_F: Tensor) -> Tensor:
    """Return sines and cosines of frame numbers: [N, 2F]; zero where the number is negative."""
    return _waves(frame_N, frequencies_F) * (frame_N >= 0)[:, None]


def _waves(place_N: Tensor, frequencies_F: Tensor) -> Tensor:
    """Return all sines, then all cosines, in float32 whatever the working dtype."""
    angle = place_N.float()[:, None] * frequencies_F
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def resized_places(rows_NB: Tensor, columns_NB: Tensor, table_BE: Tensor) -> Tensor:
    """Return rows of a square table resized to each slice, by the weights of rows and columns; float32."""
    weights_NB = (rows_NB[:, :, None] * columns_NB[:, None, :]).flatten(1)
    return weights_NB @ table_BE.float()
