"""The inputs of an export, and the traced program that results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vlexport.checkpoint import Checkpoint
from vlexport.recipe import Recipe
from vlexport.specs import Precision, Quantisation, ShapeProfile, TensorSpec

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """The inputs of a graph; `config` are the recipe's numbers, `form` is the attention layout."""

    recipe: Recipe[Any]
    checkpoint: Checkpoint
    config: Any
    precision: Precision = field(default_factory=Precision)
    form: str
    profile: ShapeProfile

    def shared(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(TowerSpec)}

    def tower(self) -> nn.Module:
        return self.recipe.tower(self.checkpoint, self.dtype, self.fp32_layers, self.input_dtype)

    @property
    def dtype(self) -> str:
        return self.precision.dtype

    @property
    def input_dtype(self) -> str:
        return self.recipe.input_dtype(self.config)

    @property
    def fp32_layers(self) -> Mapping[str, str]:
        return self.precision.fp32_layers

    @property
    def quantisation(self) -> Quantisation | None:
        return self.precision.quantisation


@dataclass(frozen=True, kw_only=True)
class Graph(TowerSpec):
    """A traced tower that serves every shape of its profile.

    The program takes one dictionary of inputs and returns one of outputs, both in the order of the specs.
    Its weights are floating point; a backend makes of them what the quantisation needs. They are those of the
    module that was traced.
    """

    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    program: ExportedProgram
