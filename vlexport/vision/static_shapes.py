"""Shapes of calls that are captured once and replayed: what a budget needs, how buffers are filled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vlexport.errors import InputError

Padding = Literal["zero", "repeat_last"]


def doubling(smallest: int, largest: int) -> tuple[int, ...]:
    """Return `smallest`, twice that and so on up to `largest`, which is always the last."""
    if not 1 <= smallest <= largest:
        raise InputError(
            f"budgets {smallest} to {largest}: expected 1 <= smallest <= largest. "
            f"A batch of max_items needs a budget of as many tokens; lower max_items or raise the largest."
        )
    budgets = [smallest]
    while budgets[-1] < largest:
        budgets.append(min(budgets[-1] * 2, largest))
    return tuple(budgets)


def max_windows(budget: int, max_items: int, max_frames: int, window_side: int) -> int:
    """Return upper bound on attention windows of a batch; `window_side` in merged cells."""
    return min(budget, max(max_items, max_frames) + -(-budget // window_side))


def refill(buffer: Tensor, values: Tensor, padding: Padding) -> None:
    """Copy values into a captured buffer and pad the rest: bounds by their last value, all else by 0."""
    if buffer.ndim == 0:
        buffer.copy_(values)
        return
    used = values.shape[0]
    if used > buffer.shape[0]:
        raise InputError(f"{used} rows given, the buffer holds {buffer.shape[0]}; use a larger budget.")
    if padding == "repeat_last" and used == 0:
        raise InputError("no boundaries given: at least the leading 0 is expected.")
    # Onto a device from pinned memory no copy waits; from other memory of the host torch stages it first.
    buffer[:used].copy_(values, non_blocking=True)
    if padding == "zero":
        buffer[used:].zero_()
    else:
        buffer[used:].copy_(buffer[used - 1 : used].expand_as(buffer[used:]))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor without a wait for the device: from the host by way of pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # An expanded tensor, such as equal positions of all axes, has no memory of its own to pin.
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")
