"""L0 of types: what has to be computed in float32 inside a half-precision tower, watched while it runs.

Angles and statistics lose too little in half precision to stand out from its noise on a few samples, and too
much on others; so the types themselves are held to the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from vlexport._export import cast_floats
from vlexport.parity.report import Row
from vlexport.parity.samples import Sample
from vlexport.parity.subject import Subject
from vlexport.parity.tables import Faults

# Angles and their tables; statistics of norms.
TABLES = ("cos", "sin")
WIDE = (*TABLES, "rsqrt", "pow", "mean", "var", "var_mean")
# What moves numbers without computing any.
MOVES = (
    "alias",
    "cat",
    "clone",
    "expand",
    "index",
    "index_select",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "squeeze",
    "stack",
    "transpose",
    "unsqueeze",
    "view",
    "_unsafe_view",
)
HALVES = (torch.bfloat16, torch.float16)
OVERFLOWING = ("_to_copy", "add", "addmm", "bmm", "linear", "matmul", "mm", "mul")


class DispatchHook(TorchDispatchMode):
    """A mode that changes nothing; subclasses write `saw`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").split(".")[0]
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.saw(name, args, made)
        return result

    def saw(self, name: str, args: Sequence[Any], made: Tensor) -> None:
        """Take note of an operation that was given `args` and made a tensor."""
        raise TypeError(f"{type(self).__name__} has no saw()")


class Watch(DispatchHook):
    """Collects operations that leave float32 too early."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self._tables = WeakTensorKeyDictionary()
        self._rounded = WeakTensorKeyDictionary()

    def saw(self, name: str, args: Sequence[Any], made: Tensor) -> None:
        self._see(name, _tensors(args), made)

    def _see(self, name: str, given: Sequence[Tensor], result: Tensor) -> None:
        if name in WIDE and result.dtype in HALVES:
            self.faults.append(f"{name} in {str(result.dtype).removeprefix('torch.')}")
        from_table, rounded = (any(each in kept for each in given) for kept in (self._tables, self._rounded))
        if name == "mul" and rounded:
            self.faults.append("rows turned by a rounded table of angles")
        if name in TABLES or (name in MOVES and from_table):
            self._tables[result] = True
        # Waves that are added to keys may be rounded like the keys; those that turn them may not.
        if (name == "_to_copy" and from_table and result.dtype in HALVES) or (name in MOVES and rounded):
            self._rounded[result] = True


def check_dtypes(tower: nn.Module, inputs: Mapping[str, Tensor]) -> Faults:
    """Return the first operation of one call that is not as wide as it has to be."""
    watch = Watch()
    with torch.no_grad(), watch:
        tower(dict(inputs))
    return {"types": watch.faults[0] if watch.faults else ""}


class Overflows(DispatchHook):
    """Collects operations whose half-precision result holds what that dtype cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def saw(self, name: str, args: Sequence[Any], made: Tensor) -> None:
        # Casts, products and sums overflow; masks are made of infinities on purpose.
        if made.dtype in HALVES and name in OVERFLOWING:
            lost = int((~torch.isfinite(made)).sum())
            if lost:
                self.faults.append(f"{name} gives {lost} values that are not finite")


def overflow_rows(subject: Subject, samples: Sequence[Sample]) -> list[Row]:
    """Return the row of L0 that counts overflows in float16; its note names the parts that stay float32."""
    if subject.dtype != "float16":
        return []
    tower, overflows = subject.tower(), Overflows()
    with torch.no_grad(), overflows:
        for sample in samples:
            inputs = subject.recipe.prepare(subject.config, sample.items, subject.form)
            tower(cast_floats(inputs, subject.dtype))
    named = f"float32: {', '.join(sorted(subject.fp32_layers)) or 'no part'}"
    return [
        Row(
            level="L0",
            check="overflow",
            shapes=f"{len(samples)} samples",
            metrics={"wrong": float(len(overflows.faults))},
            limits={"wrong": 0.0},
            origin="every operation of the typed tower in torch",
            note="; ".join([named, *overflows.faults[:1]]),
        )
    ]


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    flat: list[Tensor] = []
    for each in args:
        if isinstance(each, Tensor):
            flat.append(each)
        elif isinstance(each, tuple | list):
            flat += [inner for inner in each if isinstance(inner, Tensor)]
    return flat
