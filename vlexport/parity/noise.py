"""How much the reference itself depends on rounding: against float64, and in a smaller dtype.

Limits are multiples of these floors, measured on the same inputs, so they travel between models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vlexport.recipe import Reference
from vlexport.specs import MediaItem


class StayWide(TorchFunctionMode):
    """Inside it, what would be made or cast to float32 becomes float64: models ask for float32 in norms."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {
            name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()
        }
        return func(*wide, **named)


@contextmanager
def steady_arithmetic() -> Iterator[None]:
    """Compute float32 products in full float32, whatever the process has been set to, and restore that."""
    before = torch.get_float32_matmul_precision()
    convolution = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolution


def in_float64(reference: Reference, items: Sequence[MediaItem]) -> dict[str, Tensor]:
    """Return the reference's outputs computed in float64. Its module is float64 from then on."""
    _cast(reference.module, torch.float64, buffers=True)
    with StayWide():
        return reference.run([_cast_item(item, torch.float64) for item in items])


def in_dtype(reference: Reference, items: Sequence[MediaItem], dtype: str) -> dict[str, Tensor]:
    """Return the reference's outputs with weights and pixels in a smaller dtype; its module keeps it.

    Buffers stay: tables of angles are float32 in every loader.
    """
    kind: torch.dtype = getattr(torch, dtype)
    _cast(reference.module, kind, buffers=False)
    return reference.run([_cast_item(item, kind) for item in items])


def _cast(module: nn.Module, dtype: torch.dtype, *, buffers: bool) -> None:
    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


def _cast_item(item: MediaItem, dtype: torch.dtype) -> MediaItem:
    patches = item.patches.to(dtype) if item.patches.is_floating_point() else item.patches
    return replace(item, patches=patches)
