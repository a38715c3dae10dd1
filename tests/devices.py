"""A device that is not there: tensors that report `cuda` while the host computes their numbers.

Tensors of both devices in one operation are an error, as on a GPU. Inside `stand_in()` torch's factories and
`to` make such tensors. Speed, streams and kernels of a GPU are not shown by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

Run = Callable[..., Any]
GPU = torch.device("cuda", 0)
MOVES = {"to", "cpu", "cuda"}


class OnGpu(torch.Tensor):
    """A tensor of the host that reports the device `GPU`."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=GPU
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, *given: Any) -> Any:
        raise RuntimeError(f"{func} of a device that is not there")


class _Factories(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(func, args, dict(kwargs or {}))


@contextmanager
def stand_in() -> Iterator[None]:
    """Let `device="cuda"` mean this device."""
    with _Factories():
        yield


def computed(func: Run, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host; its results are where a GPU would leave them."""
    name, given = getattr(func, "__name__", ""), tree_flatten((args, kwargs))[0]
    ours = [each for each in given if isinstance(each, OnGpu)]
    named = [torch.device(each) for each in _devices(name, args, kwargs)]
    if name == "pin_memory":
        if any(step == 0 and size > 1 for step, size in zip(args[0].stride(), args[0].shape, strict=True)):
            raise RuntimeError("more than one element of the written-to tensor refers to a single location")
        return args[0]
    if not ours and not any(each.type == "cuda" for each in named):
        return func(*args, **kwargs)
    if name == "__get__" and not isinstance(func(*tree_map(_held, args)), torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    plain = [each for each in given if isinstance(each, torch.Tensor) and not isinstance(each, OnGpu)]
    if ours and any(each.dim() for each in plain) and name not in (*MOVES, "copy_"):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")
    if name in ("tolist", "item", "__len__", "size", "dim", "stride", "is_floating_point", "numel"):
        return func(*tree_map(_held, args), **kwargs)
    host = tree_map(lambda each: "cpu" if _is_gpu(each) else _held(each), (args, kwargs))
    result = host[0][0].clone() if name == "cuda" else func(*host[0], **host[1])
    to_host = name == "cpu" or any(each.type == "cpu" for each in named)
    return result if to_host else tree_map(lambda each: _placed(each, ours), result)


def _devices(name: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the devices that a call names: by keyword, or by position in `to`."""
    by_place = [each for each in args[1:] if isinstance(each, torch.device | str) and name == "to"]
    by_place += [GPU] if name == "cuda" else []
    return [*by_place, *([kwargs["device"]] if kwargs.get("device") is not None else [])]


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def _placed(value: Any, ours: list[OnGpu]) -> Any:
    """Return a result as a tensor of this device; of an operation in place the tensor itself."""
    if not isinstance(value, torch.Tensor):
        return value
    same = [each for each in ours if each.held is value]
    return same[0] if same else OnGpu(value)
