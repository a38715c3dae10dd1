"""What the reference loses with integers for weights: the floor of quantised engines.

Written from the definition alone and apart from what lowers graphs, so that a slip there shows here.
N rows, O outputs, C columns, G groups, W width of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.parity.metrics import Metrics
from vlexport.parity.subject import Subject
from vlexport.recipe import Limit, Reference
from vlexport.specs import Quantisation, is_quantisable

LARGEST = 127.0
ORIGIN = "parity.md 5: starting gate for {}, measured on a tower of 32 blocks"
CAPS = {
    False: Limit(relative_l2=8e-2, worst_token=0.15, origin=ORIGIN.format("int8 weights")),
    True: Limit(relative_l2=0.13, worst_token=0.30, origin=ORIGIN.format("int8 weights and activations")),
}


# On the demo checkpoint engine and reference lose 0.1426 and 0.1431 on the faint call; worst tokens of calls
# differ by 0.97 to 1.14 times.
HEADROOM, MOST_RAISED = 1.15, 1.25


def cap_of(quantisation: Quantisation) -> Limit:
    """Return the most that a quantised engine may differ, whatever the reference loses."""
    return CAPS[quantisation.activations is not None]


def raised(cap: Limit, lost: Metrics) -> Limit:
    """Return the cap, or 15 % over what the reference loses in the same integers where that is more.

    Never more than a quarter over the cap: beyond that the checkpoint does not bear integers.
    """
    limits = {
        name: min(max(getattr(cap, name), HEADROOM * getattr(lost, name)), MOST_RAISED * getattr(cap, name))
        for name in ("relative_l2", "worst_token")
    }
    own = f"{HEADROOM:g} x what the reference loses in the same integers ({lost.relative_l2:.3g})"
    return Limit(**limits, origin=own if limits["relative_l2"] > cap.relative_l2 else cap.origin)


def origin_of(quantisation: Quantisation) -> str:
    """Return whose noise an engine's is held against."""
    what = "weights" if quantisation.activations is None else "weights and what they multiply"
    return f"noise of the reference with {what} in {quantisation.name} on this input"


def quantised_reference(subject: Subject) -> Reference:
    """Return the reference with the weights of its blocks on the grid of int8, in float32 arithmetic.

    Where kernels round what a layer takes, so do these layers.
    """
    scheme = subject.quantisation
    assert scheme is not None
    names = subject.recipe.weight_names(subject.checkpoint, subject.config)
    shapes = {stored: subject.checkpoint.stored(stored).shape for stored in names.values()}
    chosen = {stored for name, stored in names.items() if is_quantisable(name, len(shapes[stored]))}
    view = _OnGrid.of(subject.checkpoint, chosen, scheme.group)
    reference = subject.recipe.reference(view)
    layers = [each for each in reference.module.modules() if isinstance(each, nn.Linear)]
    held = [each for each in layers if each.weight.untyped_storage().data_ptr() in view.places]
    if {each.weight.untyped_storage().data_ptr() for each in held} != view.places:
        raise UnsupportedError(
            f"recipe '{subject.recipe.name}': its reference does not keep every matrix of its blocks in a "
            "torch.nn.Linear, so what integers cost it cannot be measured. Build without --quantize."
        )
    if scheme.activations is not None:
        for layer in held:
            layer.register_forward_pre_hook(_rounding(scheme.activations))
    return reference


def on_grid(rows: Tensor, group: int) -> Tensor:
    """Return the nearest values of int8 with one scale for each group of columns; 0 means whole rows."""
    width = group or rows.shape[-1]
    padding = -rows.shape[-1] % width
    grouped = nn.functional.pad(rows, (0, padding)).unflatten(-1, (-1, width))
    scale = grouped.abs().amax(-1, keepdim=True) / LARGEST
    steps = torch.where(scale > 0, grouped / scale, torch.zeros_like(grouped)).round()
    values: Tensor = (steps * scale).flatten(-2)[..., : rows.shape[-1]]
    return values


def _rounding(group: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def hook(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = given[0]
        return (rows if rows.shape[-1] < group else on_grid(rows, group), *given[1:])

    return hook


@dataclass(frozen=True, kw_only=True, eq=False)
class _OnGrid(Checkpoint):
    """A checkpoint some of whose matrices are read as what int8 can hold; `places` are their memory."""

    chosen: frozenset[str]
    group: int
    places: set[int]

    @classmethod
    def of(cls, checkpoint: Checkpoint, chosen: set[str], group: int) -> _OnGrid:
        same = {each.name: getattr(checkpoint, each.name) for each in fields(checkpoint)}
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
