"""Bugs planted in the arithmetic of a tower: rotary angles, norms, attention, merger."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _rotary(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/rotary.py", old=old, new=new)


ROTARY = (
    _rotary(
        "frequencies over the whole head",
        "positions",
        "dtype=torch.float32) / half)",
        "dtype=torch.float32) / head_dim)",
    ),
    _rotary(
        "frequencies rounded to bfloat16",
        "types",
        "return 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)",
        "return (1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)).bfloat16().float()",
    ),
    _rotary(
        "axes exchanged",
        "positions",
        "positions_N2.float()[:, :, None]",
        "positions_N2.flip(-1).float()[:, :, None]",
    ),
    _rotary(
        "positions rounded to bfloat16", "types", "positions_N2.float()", "positions_N2.bfloat16().float()"
    ),
    _rotary("turned the other way", "positions", "first * cos - second * sin", "first * cos + second * sin"),
    _rotary(
        "angles in the working dtype",
        "types",
        "cos, sin = cos_NK[:, None], sin_NK[:, None]",
        "cos, sin = cos_NK[:, None].to(x_NHD.dtype), sin_NK[:, None].to(x_NHD.dtype)",
    ),
    _rotary(
        "pairs taken side by side",
        "positions",
        "x_NHD.float().chunk(2, dim=-1)",
        "(x_NHD.float()[..., ::2], x_NHD.float()[..., 1::2])",
    ),
)


def _blocks(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/blocks.py", old=old, new=new)


# Where the rows of a run are cut into segments.
_ROWS = "rows = x_NHD[start : start + count * length]\n            return rows.reshape("

BLOCKS = (
    _blocks(
        "mean removed before the norm",
        "arithmetic",
        "wide = x_NC.float()",
        "wide = x_NC.float() - x_NC.float().mean(-1, keepdim=True)",
    ),
    _blocks("norm in the working dtype", "types", "wide = x_NC.float()", "wide = x_NC"),
    _blocks("epsilon outside the root", "arithmetic", "+ self.eps)", ") + self.eps**0.5"),
    _blocks("epsilon ten times as large", "arithmetic", "+ self.eps)", "+ 10 * self.eps)"),
    _blocks(
        "norm without its weight",
        "arithmetic",
        "return self.weight * scaled",
        "return 0 * self.weight + scaled",
    ),
    _blocks("gelu for silu", "arithmetic", "F.silu(self.gate_proj(x_NC))", "F.gelu(self.gate_proj(x_NC))"),
    _blocks(
        "gate and up exchanged",
        "arithmetic",
        "F.silu(self.gate_proj(x_NC)) * self.up_proj(x_NC)",
        "F.silu(self.up_proj(x_NC)) * self.gate_proj(x_NC)",
    ),
    _blocks(
        "bias of the MLP dropped",
        "arithmetic",
        "* self.up_proj(x_NC))",
        "* self.up_proj(x_NC)) - self.down_proj.bias",
    ),
    _blocks(
        "queries and keys exchanged",
        "arithmetic",
        "(3, self.heads, -1)).unbind(1)\n",
        "(3, self.heads, -1))[:, [1, 0, 2]].unbind(1)\n",
    ),
    _blocks(
        "heads before parts of the projection",
        "order",
        "(3, self.heads, -1)).unbind(1)",
        "(self.heads, 3, -1)).unbind(2)",
    ),
    _blocks(
        "scale one percent off", "arithmetic", "q_NHD.shape[-1] ** -0.5)", "1.01 * q_NHD.shape[-1] ** -0.5)"
    ),
    _blocks(
        "scale of the whole width", "arithmetic", "q_NHD.shape[-1] ** -0.5)", "q_NHD[0].numel() ** -0.5)"
    ),
    _blocks(
        "keys not turned",
        "positions",
        "q_NHD, k_NHD = (rotate(x_NHD, view.cos_NK, view.sin_NK) for x_NHD in (q_NHD, k_NHD))",
        "q_NHD = rotate(q_NHD, view.cos_NK, view.sin_NK)",
    ),
    _blocks(
        "values turned for keys",
        "positions",
        "attend(q_NHD, k_NHD, v_NHD,",
        "attend(q_NHD, v_NHD, k_NHD,",
    ),
    _blocks(
        "bias of the output projection dropped",
        "arithmetic",
        "= self.proj(_attend(parts, view))",
        "= self.proj(_attend(parts, view)) - self.proj.bias",
    ),
    _blocks("tanh for exact gelu", "arithmetic", "nn.GELU()", 'nn.GELU(approximate="tanh")'),
    _blocks(
        "cells merged across, not within",
        "order",
        ".unflatten(0, (-1, self.unit)).flatten(1)",
        ".unflatten(0, (self.unit, -1)).transpose(0, 1).flatten(1)",
    ),
    _blocks(
        "first row zeroed",
        "arithmetic",
        "return F.linear(patches, self.proj.weight.flatten(1))",
        "return F.linear(patches, self.proj.weight.flatten(1))"
        " * (torch.arange(patches.shape[0]) > 0)[:, None].to(patches.dtype)",
    ),
    _blocks(
        "channels and frames of a patch exchanged",
        "order",
        "self.proj.weight.flatten(1)",
        "self.proj.weight.transpose(1, 2).flatten(1)",
    ),
    Mutant(
        name="residual stream cut off at 200",
        kind="types",
        file="vision/blocks.py",
        old="x_NC + self.mlp(self.norm2(x_NC))",
        new="(x_NC + self.mlp(self.norm2(x_NC))).clamp(-200.0, 200.0)",
    ),
    Mutant(
        name="residual stream rounded to bfloat16",
        kind="types",
        file="vision/blocks.py",
        old="x_NC + self.mlp(self.norm2(x_NC))",
        new="(x_NC + self.mlp(self.norm2(x_NC))).bfloat16().to(x_NC.dtype)",
    ),
    Mutant(
        name="scores over the whole run",
        kind="masks",
        file="vision/attention/kernels.py",
        old=_ROWS + "count, length, *",
        new=_ROWS + "1, count * length, *",
    ),
    Mutant(
        name="every run starts at the first row",
        kind="masks",
        file="vision/attention/kernels.py",
        old="        start = stop\n    if start != q_NHD.shape[0]:",
        new="        start = 0\n    if start > q_NHD.shape[0]:",
    ),
)

ARITHMETIC = (*ROTARY, *BLOCKS)
