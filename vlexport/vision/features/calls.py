"""A call of a class of transformers while it is traced: our attention in its place, rows that stay together.

B images, H heads, L rows of an image, N rows of a call, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from vlexport.errors import UnsupportedError
from vlexport.vision.attention.kernels import segment_attention, segment_cross_attention
from vlexport.vision.attention.layout import CrossAttention, View
from vlexport.vision.attention.segmentation import take_cells

# Classes hand the bounds of segments over to attention functions with "flash" in their name, and cut their
# rows on the host for others.
ATTENTION = "vlexport_flash_segments"


class Call(NamedTuple):
    """Segments of the call that a class computes: by the bounds that it was given, or its images.

    rows   tables with a row for each patch, in the order of the call
    strip  side of a cell where the class sees the cells of a call side by side, as one wide image; else 0
    groups frames as one learned query sees them, where a class pools so
    dry    nothing is computed, and attention gives back what it is given
    """

    views: Sequence[tuple[Tensor, View]] = ()
    unit: int = 1
    image_runs: Tensor | None = None
    images: int | SymInt = 0
    rows: Mapping[str, Tensor] = MappingProxyType({})
    strip: int = 0
    groups: CrossAttention | None = None
    dry: bool = False


_CALL: ContextVar[Call] = ContextVar("call")


def attend(  # noqa: PLR0913  the signature of an attention function of transformers
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend inside our segments, [B, H, L, D] to [B, L, H, D], as a class of transformers calls it."""
    call = _CALL.get()
    if call.dry:
        return query.transpose(1, 2), None
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    if key.shape[1] != query.shape[1]:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    for bounds, view in call.views:
        if bounds is cu_seq_lens_q or call.strip:
            return _segments(rows, view, call, scale)[None], None
    if cu_seq_lens_q is not None:
        raise UnsupportedError(
            f"{type(module).__name__} attends in segments of its own, which have no table."
        )
    is_whole = attention_mask is None and statically_known_true(query.shape[0] == call.images)
    if call.image_runs is None or not is_whole:
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
        return mixed.transpose(1, 2), None
    count_11, lengths = call.image_runs[:, :1], (query.shape[2], key.shape[2])
    same = statically_known_true(lengths[0] == lengths[1])
    runs = torch.cat([count_11.new_full((1, 1), length) for length in lengths[int(same) :]], dim=1)
    kernel = segment_attention if same else segment_cross_attention
    mixed = kernel(*(tensor.contiguous() for tensor in rows), torch.cat([count_11, runs], dim=1), scale)
    return mixed.unflatten(0, (-1, query.shape[2])), None


def _segments(rows: Sequence[Tensor], view: View, call: Call, scale: float) -> Tensor:
    heads = rows[0].shape[1]
    by_cell = (cells_of_strip(tensor, call.strip) for tensor in rows)
    q, k, v = (
        take_cells(cells.flatten(1), view.order_M, call.unit).unflatten(1, (heads, -1)) for cells in by_cell
    )
    mixed_NHD = view.attention.attend(q, k, v, scale)
    mixed = take_cells(mixed_NHD.flatten(1), view.inverse_M, call.unit).unflatten(1, (heads, -1))
    return strip_of_cells(mixed, call.strip)


def strip_of_cells(rows: Tensor, side: int) -> Tensor:
    """Bring rows cell by cell into the raster order of all cells side by side."""
    if side < 2:
        return rows
    cells, rest = rows.shape[0] // side**2, rows.shape[1:]
    return rows.reshape(cells, side, side, *rest).transpose(0, 1).reshape(cells * side**2, *rest)


def cells_of_strip(rows: Tensor, side: int) -> Tensor:
    """Undo `strip_of_cells`."""
    if side < 2:
        return rows
    cells, rest = rows.shape[0] // side**2, rows.shape[1:]
    return rows.reshape(side, cells, side, *rest).transpose(0, 1).reshape(cells * side**2, *rest)


class FunctionMode(TorchFunctionMode):
    """Gives calls of torch functions to `call`, with their arguments."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_convolution = func in (F.conv2d, F.conv3d) and torch.compiler.is_exporting()
        if is_convolution and (product := _product(*args, **kwargs or {})) is not None:
            return product
        return self.call(func, args, dict(kwargs or {}))

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise TypeError(f"{type(self).__name__} has no call()")


class _Size:
    """Sizes that a class reads on the host to cut the rows of a call apart, which stay together here."""

    def __iter__(self) -> Iterator[int]:
        raise UnsupportedError("the class reads sizes on the host for more than to cut rows apart by image.")

    def __floordiv__(self, _: object) -> _Size:
        return self

    def tolist(self) -> _Size:
        return self


class HostSizes(tuple[Any, ...]):
    """Sizes of a call that a class reads row by row on the host; what it computes of all only cuts rows."""

    def prod(self, *_: object, **__: object) -> _Size:
        return _Size()

    def __pow__(self, _: int) -> _Size:
        return _Size()


class UncutRows(FunctionMode):
    """Keeps the rows of a call together where a class cuts them apart by image.

    A call holds no image of padding either, which some classes look for: bytes give no pixel of zero.
    """

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (torch.tensor, torch.as_tensor) and any(
            isinstance(leaf, SymInt) for leaf in tree_leaves(args)
        ):
            # Sizes of the whole call, which only decide where to cut it.
            return torch.zeros(1, 2, dtype=torch.int32)
        if func in (Tensor.tolist, Tensor.item):
            return _Size()
        if func in (torch.split, Tensor.split) and _is_unknown(args[1] if len(args) > 1 else None):
            return (args[0],)
        if args and isinstance(args[0], Tensor) and _has_unknown_rows(args[0]):
            if func is Tensor.__len__:
                return 1
            if func is Tensor.unbind and _axis(args, kwargs) == 0:
                return (args[0],)
            if func is Tensor.squeeze and _axis(args, kwargs) == 0:
                return args[0]
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return args[0]
        return func(*args, **kwargs)


class Folded(FunctionMode):
    """Computes what depends on constants alone while a class is traced, so that it can read them."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        # Floats that are allocated empty are written to later; integers are offsets of constants.
        is_written = func is torch.empty and kwargs.get("dtype") not in (torch.int32, torch.int64)
        if is_written or any(isinstance(leaf, SymInt) or _is_traced(leaf) for leaf in leaves):
            if (
                func is Tensor.__getitem__
                and isinstance(mask := args[1], Tensor)
                and mask.dtype == torch.bool
            ):
                with _disable_current_modes():
                    args = (args[0], mask.nonzero(as_tuple=True)) if not _is_traced(mask) else args
            with _disable_current_modes():
                args, kwargs = tree_map(_number, (args, kwargs))
            mixed = func(*args, **kwargs)
            if func is F.scaled_dot_product_attention:
                # Its strides differ between kernels, and a graph keeps what follows from them.
                return mixed.clone(memory_format=torch.contiguous_format)
            return mixed
        with _disable_current_modes():
            return func(*args, **kwargs)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *further: Any, **named: Any
) -> Tensor | None:
    """Return a convolution of inputs as large as its kernel, which is one product, and faster as one."""
    padding = named.get("padding", further[1] if len(further) > 1 else 0)
    is_padded = padding != "valid" and any(padding if isinstance(padding, Sequence) else [padding])
    # All axes but that of the batch: with groups, a kernel has fewer channels.
    if is_padded or tuple(x.shape[1:]) != tuple(weight.shape[1:]):
        return None
    rows_ND = F.linear(x.flatten(1), weight.flatten(1), bias)
    return rows_ND.reshape(*rows_ND.shape, *(1 for _ in weight.shape[2:]))


def _number(leaf: Any) -> Any:
    """Return a constant integer, or a slice that has some, as the host reads it."""
    if isinstance(leaf, slice):
        return slice(*(_number(bound) for bound in (leaf.start, leaf.stop, leaf.step)))
    is_integer = type(leaf) is Tensor and leaf.ndim == 0 and leaf.dtype in (torch.int32, torch.int64)
    return leaf.item() if is_integer else leaf


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and type(leaf) is not Tensor


def _has_unknown_rows(rows: Any) -> bool:
    return rows.ndim > 0 and isinstance(rows.shape[0], SymInt)


def _is_unknown(sizes: object) -> bool:
    several = isinstance(sizes, list) and all(isinstance(size, _Size) for size in sizes)
    return isinstance(sizes, _Size) or several


def _axis(args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    return args[1] if len(args) > 1 else kwargs.get("dim", 0)


def register() -> None:
    """Make `attend` known to transformers by its name, with no mask besides the segments."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *_, **__: None)


def current() -> Call:
    """Return the call that is computed."""
    return _CALL.get()


@contextmanager
def inside(call: Call) -> Iterator[None]:
    """Make a call's segments known to `attend`, and keep its rows together."""
    token = _CALL.set(call)
    try:
        with UncutRows():
            yield
    finally:
        _CALL.reset(token)
