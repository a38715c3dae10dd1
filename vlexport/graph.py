"""A traced tower: the exported program, and everything a backend or a bundle has to know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlexport.checkpoint import Checkpoint
from vlexport.recipe import Recipe
from vlexport.specs import Quantisation, ShapeProfile, TensorSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What `export` gives: one program that serves every shape of its profile.

    The program takes one dictionary of inputs and returns one of outputs, both in the order of the specs.
    `islands` are parts of the tower that are typed otherwise than `dtype`. Weights are floating point;
    `quantisation` says what a backend has to make of them.
    """

    recipe: Recipe[Any]
    checkpoint: Checkpoint
    config: Any
    dtype: str
    quantisation: Quantisation | None = None
    form: str
    profile: ShapeProfile
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    program: ExportedProgram
    islands: Mapping[str, str] = field(default_factory=dict)
