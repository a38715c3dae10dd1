"""Programs side by side in one package, of which a call wants one.

Most of what a small program takes to compile is torch's headers and its container, which are then compiled
once. A call gives the others a few numbers to work on, which takes them microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

# Of a size that is free, for programs whose results nobody wants.
IDLE_SIZE = 4


class Part(NamedTuple):
    """A program with tensors for an example, the sizes of each that are free, and how many it returns.

    No two free sizes of a package are alike in the example: equal ones may be taken for one.
    """

    program: nn.Module
    example: tuple[Tensor, ...]
    sizes: tuple[Mapping[int, Any], ...]
    num_results: int

    def idle(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the smallest tensors that the program takes; ones are places and shares everywhere."""
        tensors = []
        for tensor, free in zip(self.example, self.sizes, strict=True):
            shape = [IDLE_SIZE if axis in free else size for axis, size in enumerate(tensor.shape)]
            tensors.append(torch.ones(shape, dtype=tensor.dtype, device=device))
        return tuple(tensors)


class _Together(nn.Module):
    """Programs whose tensors, and whose results, follow each other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.programs = nn.ModuleList(part.program for part in parts)
        self.counts = [len(part.example) for part in parts]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for program, count in zip(self.programs, self.counts, strict=True):
            outputs = program(*tensors[:count])
            results += [outputs] if isinstance(outputs, Tensor) else outputs
            tensors = tensors[count:]
        return tuple(results)


def exported(parts: Sequence[Part], device: str) -> ExportedProgram:
    """Trace programs into one."""
    example = tuple(tensor.to(device) for part in parts for tensor in part.example)
    sizes = tuple(dict(free) for part in parts for free in part.sizes)
    return torch.export.export(_Together(parts).eval(), example, dynamic_shapes=(sizes,), strict=False)


def functions(
    run: Callable[..., Sequence[Tensor]], parts: Sequence[Part]
) -> Iterator[Callable[..., Sequence[Tensor]]]:
    """Return what calls each part of a package."""
    first = 0
    for at, part in enumerate(parts):
        yield _function(run, parts[:at], parts[at + 1 :], slice(first, first + part.num_results))
        first += part.num_results


def _function(
    run: Callable[..., Sequence[Tensor]], before: Sequence[Part], after: Sequence[Part], results: slice
) -> Callable[..., Sequence[Tensor]]:
    @cache
    def idle(device: torch.device) -> list[list[Tensor]]:
        return [[tensor for part in side for tensor in part.idle(device)] for side in (before, after)]

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        ahead, behind = idle(tensors[0].device)
        return run(*ahead, *tensors, *behind)[results]

    return call
