"""Memory of one sequence in a decoder: keys, values and states, and the layers of transformers that use it.

transformers' own caches are not used: their methods and the name of the argument change between its releases.
Its attention interface, a function called with the keys and values of a step, is documented and stays.

N tokens of a step, S places, K key/value heads, D width. Of Mamba: H heads of width P, I all their widths,
R width of a state, C channels of the convolution, W its window less one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = "vlexport"


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a sequence to return to: tokens up to it, and the states after them."""

    num_tokens: int
    states: dict[int, tuple[Tensor, Tensor]]


# transformers' DynamicCache (5.23) gives the same logits bit for bit, but copies all keys and values for
# every token (2.9 ms where this takes 2.3, at 3,000 tokens of 3 layers) and cannot be compiled; its
# StaticCache attends over all it has allocated, and logits differ by up to 3e-6.
class Memory:
    """Keys and values of one sequence, allocated with its first tokens; states of layers that have these.

    places_N   the places that the step's tokens take
    visible    how many places attention sees; None shows all, for a graph of one fixed shape
    mask_11NS  which of these each token of the step sees; None: those up to its own
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.length = length
        self.num_tokens = 0
        self.places_N = torch.arange(0, device=device)
        self.visible: int | None = None
        self.mask_11NS: Tensor | None = None
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def advance(self, count: int, *, show_all: bool) -> None:
        before, after = self.num_tokens, self.num_tokens + count
        self.places_N = torch.arange(before, after, device=self.places_N.device)
        self.visible = None if show_all else after
        self.num_tokens = after
        # A prompt's first chunk has no mask: attention that is causal by itself gives the same bits on a
        # processor and skips the hidden half, 4 % of a prefill of 589 tokens and 9 % of 2,048 in bfloat16.
        self.mask_11NS = None
        if before or show_all:
            places_S = torch.arange(self.length if show_all else after, device=self.places_N.device)
            self.mask_11NS = (places_S[None] <= self.places_N[:, None])[None, None]

    def reserve(self, length: int) -> None:
        """Make room for so many tokens; what is kept stays."""
        if length <= self.length:
            return
        self.length = length
        below = 0, 0, 0, length - self.num_tokens
        for layer, kept in self.kept.items():
            keys_KSD, values_KSD = (nn.functional.pad(rows[:, : self.num_tokens], below) for rows in kept)
            self.kept[layer] = keys_KSD, values_KSD

    def mark(self) -> Mark:
        # States are replaced, never written into.
        return Mark(self.num_tokens, dict(self.states))

    def rewind(self, mark: Mark) -> None:
        self.num_tokens, self.states = mark.num_tokens, dict(mark.states)

    def update(self, layer: int, keys_1KND: Tensor, values_1KND: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.kept:
            one, other = (
                rows.new_zeros(rows.shape[1], self.length, rows.shape[3]) for rows in (keys_1KND, values_1KND)
            )
            self.kept[layer] = one, other
        keys_KSD, values_KSD = self.kept[layer]
        keys_KSD.index_copy_(1, self.places_N, keys_1KND[0])
        values_KSD.index_copy_(1, self.places_N, values_1KND[0])
        return keys_KSD[None, :, : self.visible], values_KSD[None, :, : self.visible]


@cache
def register_attention() -> str:
    """Register attention over a `Memory` with transformers, once, and return its name there."""
    from transformers import AttentionInterface

    sdpa = AttentionInterface()["sdpa"]

    def attend(
        module: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        memory: Memory | None = options.pop("vlexport_memory", None)
        if memory is not None:
            keys, values = memory.update(module.layer_idx, keys, values)
            mask = memory.mask_11NS
            # transformers copies keys and values for each of the heads that share them, but for single
            # tokens: 10 ms of a layer for a pair of frames behind 4,000 tokens. These bits are the same.
            if query.device.type == "cpu" and query.shape[2] > 1 and options.get("softcap") is None:
                attended_1HND = nn.functional.scaled_dot_product_attention(
                    query,
                    keys,
                    values,
                    attn_mask=mask,
                    scale=options.get("scaling"),
                    is_causal=mask is None,
                    enable_gqa=True,
                )
                return attended_1HND.transpose(1, 2).contiguous(), None
        attended: tuple[Tensor, None] = sdpa(module, query, keys, values, mask, **options)
        return attended

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def keep_states(body: nn.Module) -> int:
    """Let Mamba layers keep their states in a `Memory`; return how many there are."""
    layers = [module for module in body.modules() if hasattr(module, "A_log") and hasattr(module, "D")]
    for module in layers:
        module.__class__ = Mamba2
    return len(layers)


class Mamba2(nn.Module):
    """A Mamba 2 layer over weights with the names of checkpoints, for whole prompts, parts and single tokens.

    The sums are those of https://arxiv.org/abs/2405.21060, section 6: as masked attention inside a chunk,
    by the state from one chunk to the next, all in float32.
    """

    layer_idx: int
    config: Any
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    in_proj: nn.Linear
    conv1d: nn.Conv1d
    out_proj: nn.Linear
    norm: nn.Module

    def forward(self, hidden_1ND: Tensor, vlexport_memory: Memory | None = None, **_: object) -> Tensor:
        from transformers.activations import ACT2FN

        heads, channels, inner = len(self.A_log), self.conv1d.in_channels, self.out_proj.in_features
        memory = vlexport_memory or Memory(hidden_1ND.shape[1], hidden_1ND.device)
        gate_1NI, mixed_1NC, dt_1NH = self.in_proj(hidden_1ND).split([inner, channels, heads], dim=-1)
        if self.layer_idx in memory.states:
            window_1CW, state_HPR = memory.states[self.layer_idx]
        else:
            window_1CW = mixed_1NC.new_zeros(1, channels, self.conv1d.kernel_size[0] - 1)
            groups = self.config.n_groups
            shape = heads, inner // heads, (channels - inner) // groups // 2
            state_HPR = torch.zeros(shape, dtype=torch.float32, device=hidden_1ND.device)
        window_1CN = torch.cat([window_1CW, mixed_1NC.mT], dim=-1)
        width = window_1CW.shape[-1]
        mixed_1CN = nn.functional.conv1d(window_1CN, self.conv1d.weight, self.conv1d.bias, groups=channels)
        mixed_NC = ACT2FN[self.config.mamba_hidden_act](mixed_1CN)[0].mT.float()
        dt_NH = nn.functional.softplus(dt_1NH[0] + self.dt_bias).float()
        # The publisher's kernels bound the step of sequences and not of single tokens that follow.
        if len(dt_NH) > 1 or self.layer_idx not in memory.states:
            dt_NH = dt_NH.clamp(min=self.config.time_step_min)
        rows_NHP, state_HPR = self._scan(mixed_NC, dt_NH, state_HPR)
        memory.states[self.layer_idx] = window_1CN[:, :, window_1CN.shape[-1] - width :].clone(), state_HPR
        output: Tensor = self.out_proj(self.norm(rows_NHP.flatten(1)[None], gate_1NI).to(hidden_1ND.dtype))
        return output

    def _scan(self, mixed_NC: Tensor, dt_NH: Tensor, state_HPR: Tensor) -> tuple[Tensor, Tensor]:
        heads, width, size = state_HPR.shape
        groups = self.config.n_groups
        parts = mixed_NC.split([heads * width, groups * size, groups * size], dim=-1)
        into_NHR, out_NHR = (
            part.unflatten(1, (groups, size)).repeat_interleave(heads // groups, dim=1) for part in parts[1:]
        )
        x_NHP = parts[0].unflatten(1, (heads, width))
        fade_NH = -self.A_log.float().exp() * dt_NH
        rows = []
        for start in range(0, len(x_NHP), self.config.chunk_size):
            chunk = slice(start, start + self.config.chunk_size)
            # Differences of long sums lose digits, so they are taken in float64.
            sums_HN = fade_NH[chunk].double().cumsum(0).T
            between_HNN = (sums_HN[:, :, None] - sums_HN[:, None]).float()
            hidden_NN = between_HNN.new_ones(between_HNN.shape[1:], dtype=torch.bool).triu(1)
            seen_HNN = between_HNN.masked_fill(hidden_NN, float("-inf")).exp()
            into_HNR, out_HNR = into_NHR[chunk].transpose(0, 1), out_NHR[chunk].transpose(0, 1)
            x_HNP = (dt_NH[chunk, :, None] * x_NHP[chunk]).transpose(0, 1)
            before_HNP = sums_HN.float().exp()[:, :, None] * (out_HNR @ state_HPR.mT)
            rows.append((before_HNP + (out_HNR @ into_HNR.mT * seen_HNN) @ x_HNP).transpose(0, 1))
            left_HN = (sums_HN[:, -1:] - sums_HN).float().exp()
            state_HPR = sums_HN[:, -1].float().exp()[:, None, None] * state_HPR
            state_HPR = state_HPR + (x_HNP * left_HN[:, :, None]).mT @ into_HNR
        return torch.cat(rows) + self.D.float()[:, None] * x_NHP, state_HPR
