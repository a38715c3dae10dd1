"""What is being checked, and how much of a machine the check may take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from vlexport._export import typed_tower
from vlexport.backends import Backend, capability_of
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import Limit, Recipe
from vlexport.specs import Quantisation
from vlexport.vision.attention.packing import Packing

# Beyond this depth the noise of a whole tower hides small faults, so every block is checked by itself.
DEEP = 8
# Towers above this many weights take seconds a call on a small machine.
HEAVY = 100_000_000
MAX_PATCHES, MAX_PATCHES_HEAVY = 4096, 640
# The float64 pass of the reference is measured on calls of at most this many patches; larger ones are held
# to float32, with the largest noise of the others.
MAX_WIDE_PATCHES, MAX_WIDE_PATCHES_HEAVY = 1024, 128


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An engine's origin; without a backend, blocks of deep towers are checked in torch alone."""

    recipe: Recipe[Any]
    config: Any
    checkpoint: Checkpoint
    form: str
    dtype: str
    quantisation: Quantisation | None = None
    backend: Backend | None = None
    islands: Mapping[str, str] = field(default_factory=dict)

    def tower(self) -> nn.Module:
        """Our tower, typed as the engine's is."""
        return typed_tower(self.recipe, self.checkpoint, self.dtype, self.islands)

    @property
    def packing(self) -> Packing:
        """How the recipe packs media into calls."""
        return self.recipe.packing(self.config)

    @property
    def is_exact(self) -> bool:
        """Nothing but float32: an error beyond rounding is a fault."""
        return self.dtype == "float32" and self.quantisation is None

    @property
    def heavy(self) -> bool:
        names = self.recipe.weight_names(self.checkpoint, self.config).values()
        return sum(math.prod(self.checkpoint.stored(name).shape) for name in names) > HEAVY

    def in_float32(self) -> Subject:
        """The same in float32; without the backend if it does not serve that."""
        serves = self.backend is not None and capability_of(self.backend, "float32") is not None
        backend = self.backend if serves else None
        return replace(self, dtype="float32", islands={}, quantisation=None, backend=backend)

    @property
    def structure_limit(self) -> Limit | None:
        """The recipe's limit for float32, if it has one."""
        return self.recipe.limits.get("float32")
