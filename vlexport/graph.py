"""A traced tower: the exported program, and everything a backend or a bundle has to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlexport.checkpoint import Checkpoint
from vlexport.recipe import Recipe
from vlexport.specs import ShapeProfile, TensorSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What `export` gives: one program that serves every shape of its profile.

    The program takes one dictionary of inputs and returns one of outputs, both in the order of the specs.
    """

    recipe: Recipe[Any]
    checkpoint: Checkpoint
    config: Any
    dtype: str
    form: str
    profile: ShapeProfile
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    program: ExportedProgram
