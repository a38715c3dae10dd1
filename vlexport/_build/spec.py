"""The one description of a build; graph, key, manifest and accuracy check follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport._build.estimate import TowerScale
from vlexport._build.graph import TowerSpec
from vlexport.backends import Backend, Options, capability_of
from vlexport.checkpoint.files import StoredTensor
from vlexport.recipe import Limit
from vlexport.specs import Precision

if TYPE_CHECKING:
    from vlexport.vision.attention.packing import Packing

# Towers above this many weights take seconds a call on a small machine.
HEAVY = 100_000_000


@dataclass(frozen=True, kw_only=True)
class BuildSpec(TowerSpec):
    """Everything that the result of a build depends on, and the folder that it goes to.

    backend   None where an accuracy check computes in torch
    selector  the method that prunes videos; None where the family has nothing to prune
    cells     the rules that choose what the tower gets and are compiled into the bundle
    tensors   the checkpoint's tensors by their names in the tower, from headers alone
    """

    backend: Backend | None = None
    options: Options = field(default_factory=Options)
    selector: str | None = None
    cells: tuple[str, ...] = ()
    output_dir: Path = Path("engines")
    tensors: Mapping[str, StoredTensor]

    def in_float32(self) -> BuildSpec:
        """Return the same in float32; without the backend if it does not serve that."""
        serves = self.backend is not None and capability_of(self.backend, "float32") is not None
        return replace(self, precision=Precision(), backend=self.backend if serves else None)

    @property
    def scale(self) -> TowerScale:
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return TowerScale.of(shapes, self.recipe.row_width(self.config))

    @property
    def model(self) -> str:
        """Return the last word of the checkpoint's place."""
        location = self.checkpoint.location
        return Path(location.hub_id or location.place).name

    @property
    def size(self) -> int:
        return self.scale.stored("float32", None)

    @property
    def packing(self) -> Packing:
        return self.recipe.packing(self.config)

    @property
    def is_exact(self) -> bool:
        """True if all is float32: an error beyond rounding is a fault."""
        return self.dtype == "float32" and self.quantisation is None

    @property
    def heavy(self) -> bool:
        return self.scale.num_weights > HEAVY

    @property
    def structure_limit(self) -> Limit | None:
        return self.recipe.limits.get("float32")
