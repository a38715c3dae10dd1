"""Dependence of the reference itself on rounding: against float64, in a smaller dtype, and in integers.

Limits are multiples of these floors, measured on the same inputs, so they travel between models. Integers are
written from the definition alone and apart from what lowers graphs, so that a slip there shows here.
N rows, O outputs, C columns, G groups, W width of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vlexport._build.spec import BuildSpec
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.parity.metrics import Metrics
from vlexport.parity.pixels import reference_of
from vlexport.recipe import Limit, Reference
from vlexport.specs import MediaItem, Quantisation, is_quantizable

LARGEST = 127.0
# Values of a matrix that a pass in float64 casts where it is used, and its rows that are cast at once.
LARGE, AT_ONCE = 1 << 18, 256
# Attributes of tensors that are read without their values.
FACTS = frozenset({"dtype", "shape", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta"})
ORIGIN = "parity.md 5: starting gate for {}, measured on a tower of 32 blocks"
CAPS = {
    False: Limit(relative_l2=8e-2, worst_token=0.15, origin=ORIGIN.format("int8 weights")),
    True: Limit(relative_l2=0.13, worst_token=0.30, origin=ORIGIN.format("int8 weights and activations")),
}
# On the demo checkpoint engine and reference lose 0.1426 and 0.1431 on the faint call; worst tokens of calls
# differ by 0.97 to 1.14 times.
HEADROOM, MOST_RAISED = 1.15, 1.25
# One entry for each check that computes in full float32: what the first of them found.
_STEADYING, _STEADY = Lock(), list[tuple[str, bool]]()


class StayWide(TorchFunctionMode):
    """Inside it, what would be made or cast to float32 becomes float64: models cast to float32 in norms.

    Parameters that are float32 are cast where they are used, matrices of products a few rows at a time.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if getattr(getattr(func, "__self__", None), "__name__", None) in FACTS:
            return func(*args, **named)
        if func is nn.functional.linear and any(map(_is_narrow, (*args[1:2], named.get("weight")))):
            return _wide_product(*args, **named)
        return func(*map(_widened, args), **{name: _widened(value) for name, value in named.items()})


def _is_narrow(value: object) -> bool:
    return isinstance(value, nn.Parameter) and value.dtype == torch.float32


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value.double() if _is_narrow(value) else value


def _wide_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  torch's
    """Return a linear layer in float64; its matrix as a whole would be twice what it is stored in."""
    output = input.new_empty((*input.shape[:-1], len(weight)), dtype=torch.float64)
    for start in range(0, len(weight), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        added = None if bias is None else bias[part].double()
        output[..., part] = nn.functional.linear(input, weight[part].double(), added)
    return output


@contextmanager
def steady_arithmetic() -> Iterator[None]:
    """Compute float32 products in full float32, whatever the process has been set to, and restore that."""
    with _STEADYING:
        # Of several threads the last one puts back what the first one found.
        own = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        _STEADY.append(_STEADY[0] if _STEADY else own)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        with _STEADYING:
            before, convolution = _STEADY.pop()
            if not _STEADY:
                torch.set_float32_matmul_precision(before)
                torch.backends.cudnn.allow_tf32 = convolution


def in_float64(reference: Reference, items: Sequence[MediaItem]) -> dict[str, Tensor]:
    """Return the reference's outputs computed in float64."""
    with float64_arithmetic(reference.module, items) as wide:
        return reference.run(wide)


@contextmanager
def float64_arithmetic(module: nn.Module, items: Sequence[MediaItem] = ()) -> Iterator[list[MediaItem]]:
    """Compute in float64 what this module computes, and give the items' patches so.

    It is float64 from then on, but for large matrices: a copy of them is 5 GB for a tower of 630 million
    values.
    """
    _cast(module, torch.float64, buffers=True, most=LARGE)
    with StayWide():
        yield [_cast_item(item, torch.float64) for item in items]


def tables_of(module: nn.Module) -> dict[str, Tensor]:
    """Return constants that a class computed: floating, of several values, outside of its state."""
    stored = module.state_dict().keys()
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name not in stored and buffer.is_floating_point() and buffer.numel() > 1 and not buffer.is_meta
    }


def in_dtype(reference: Reference, items: Sequence[MediaItem], dtype: str) -> dict[str, Tensor]:
    """Return outputs with weights and pixels in a smaller dtype, which the module keeps; buffers stay."""
    kind: torch.dtype = getattr(torch, dtype)
    _cast(reference.module, kind, buffers=False)
    return reference.run([_cast_item(item, kind) for item in items])


def _cast(module: nn.Module, dtype: torch.dtype, *, buffers: bool, most: int | None = None) -> None:
    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    for tensor in tensors:
        kept = most is not None and tensor.ndim == 2 and tensor.numel() > most
        if tensor.is_floating_point() and tensor.dtype != dtype and not kept:
            tensor.data = tensor.data.to(dtype)


def _cast_item(item: MediaItem, dtype: torch.dtype) -> MediaItem:
    patches = item.patches.to(dtype) if item.patches.is_floating_point() else item.patches
    return replace(item, patches=patches)


def cap_of(quantisation: Quantisation) -> Limit:
    """Return the most that a quantised engine may differ, whatever the reference loses."""
    return CAPS[quantisation.activations is not None]


def raised(cap: Limit, lost: Metrics) -> Limit:
    """Return the cap, or 15 % over what the reference loses in these integers, at most 1.25 times the cap."""
    limits = {
        name: min(max(getattr(cap, name), HEADROOM * getattr(lost, name)), MOST_RAISED * getattr(cap, name))
        for name in ("relative_l2", "worst_token")
    }
    own = f"{HEADROOM:g} x what the reference loses in the same integers ({lost.relative_l2:.3g})"
    return Limit(**limits, origin=own if limits["relative_l2"] > cap.relative_l2 else cap.origin)


def origin_of(quantisation: Quantisation) -> str:
    """Return whose noise that of an engine is compared with."""
    what = "weights" if quantisation.activations is None else "weights and what they multiply"
    return f"noise of the reference with {what} in {quantisation.name} on this input"


def quantized_reference(subject: BuildSpec) -> Reference:
    """Return the reference with blocks' weights on the grid of int8, and inputs where kernels do so."""
    scheme = subject.quantisation
    assert scheme is not None
    names = subject.recipe.weight_names(subject.checkpoint, subject.config)
    shapes = {stored: subject.checkpoint.stored(stored).shape for stored in names.values()}
    chosen = {stored for name, stored in names.items() if is_quantizable(name, len(shapes[stored]))}
    view = _OnGrid.of(subject.checkpoint, chosen, scheme.group)
    reference = reference_of(subject, view)
    layers = [layer for layer in reference.module.modules() if isinstance(layer, nn.Linear)]
    held = [layer for layer in layers if layer.weight.untyped_storage().data_ptr() in view.places]
    if {layer.weight.untyped_storage().data_ptr() for layer in held} != view.places:
        raise UnsupportedError(
            f"recipe '{subject.recipe.name}': its reference does not keep every matrix of its blocks in a "
            "torch.nn.Linear, so what integers cost it cannot be measured. Build without quantize."
        )
    if scheme.activations is not None:
        for layer in held:
            layer.register_forward_pre_hook(_rounding(scheme.activations))
    return reference if scheme.rest == "float32" else _Narrowed(reference, getattr(torch, scheme.rest), held)


class _Narrowed:
    """A reference that runs in `NarrowRest`."""

    def __init__(self, reference: Reference, dtype: torch.dtype, held: Sequence[nn.Linear]) -> None:
        self.module, self._reference, self._dtype = reference.module, reference, dtype
        self._held = {layer.weight.data_ptr() for layer in held}

    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        with NarrowRest(self._dtype, self._held):
            return self._reference.run(items)

    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        with NarrowRest(self._dtype, self._held):
            return self._reference.blocks(items)


class NarrowRest(TorchFunctionMode):
    """Inside it, attention is computed in a smaller dtype, and so are linear layers behind the first held."""

    def __init__(self, dtype: torch.dtype, held: set[int]) -> None:
        super().__init__()
        self._dtype, self._held, self._begun = dtype, held, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        narrow = func is nn.functional.scaled_dot_product_attention
        if func is nn.functional.linear:
            held = (args[1] if args[1:] else named["weight"]).data_ptr() in self._held
            self._begun |= held
            narrow = self._begun and not held
        if not narrow:
            return func(*args, **named)
        result: Tensor = func(
            *map(self._rounded, args), **{name: self._rounded(value) for name, value in named.items()}
        )
        return result.float()

    def _rounded(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def on_grid(rows: Tensor, group: int) -> Tensor:
    """Return the nearest values of int8 with one scale for each group of columns; 0 means whole rows."""
    width = group or rows.shape[-1]
    padding = -rows.shape[-1] % width
    grouped = nn.functional.pad(rows, (0, padding)).unflatten(-1, (-1, width))
    steps, scale = steps_of(grouped)
    values: Tensor = (steps * scale).flatten(-2)[..., : rows.shape[-1]]
    return values


def steps_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what int8 holds: steps up to 127, and the size of a step for each row; zeros have size 0."""
    scale = rows.abs().amax(-1, keepdim=True) / LARGEST
    return (rows / torch.where(scale > 0, scale, 1.0)).round(), scale


def _rounding(group: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = inputs[0]
        return (rows if rows.shape[-1] < group else on_grid(rows, group), *inputs[1:])

    return hook


@dataclass(frozen=True, kw_only=True, eq=False)
class _OnGrid(Checkpoint):
    """A checkpoint some of whose matrices are read as what int8 can hold; `places` are their memory."""

    chosen: frozenset[str]
    group: int
    places: set[int]

    @classmethod
    def of(cls, checkpoint: Checkpoint, chosen: set[str], group: int) -> _OnGrid:
        same = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
        return cls(**same, chosen=frozenset(chosen), group=group, places=set())

    def tensors(
        self, names: Mapping[str, str] | Sequence[str], *, dtype: str | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        stored = names if isinstance(names, Mapping) else {name: name for name in names}
        for name, tensor in super().tensors(names, dtype=dtype):
            if stored[name] in self.chosen:
                rounded = on_grid(tensor, self.group)
                self.places.add(rounded.untyped_storage().data_ptr())
                yield name, rounded
            else:
                yield name, tensor
