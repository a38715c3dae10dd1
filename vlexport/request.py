"""What is asked to be built: recipe, backend, dtype, shapes and devices, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.backends import (
    Backend,
    BuildLimits,
    Options,
    Progress,
    backend_names,
    capability_of,
    find_backend,
    require,
)
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.recipe import Recipe, recipe_for
from vlexport.specs import MediaBounds, Quantisation, ShapeProfile, TensorSpec, union

if TYPE_CHECKING:
    from vlexport.estimate import Costs, DeviceNeeds, TowerScale
    from vlexport.target import Target


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What to build: everything that the result depends on, and where it goes.

    islands  parts of the tower that stay float32; None finds out by measuring
    """

    checkpoint: Checkpoint
    recipe: Recipe[Any]
    backend: Backend
    dtype: str = "float32"
    quantisation: Quantisation | None = None
    profile: ShapeProfile
    islands: Mapping[str, str] | None = None
    options: Options = field(default_factory=Options)
    into: Path = Path("engines")

    @property
    def form(self) -> str:
        return self.backend.form

    @property
    def quantise(self) -> str | None:
        """The quantisation by its name."""
        return self.quantisation.name if self.quantisation else None

    @property
    def costs(self) -> Costs | None:
        """What the backend takes in this precision, where it was measured."""
        able = capability_of(self.backend, self.dtype, self.quantise)
        return able.costs if able else None

    def tower_scale(self) -> TowerScale:
        """The sizes of the tower that estimates go by, from headers alone."""
        from vlexport.estimate import TowerScale

        config = self.recipe.read_config(self.checkpoint)
        names = self.recipe.weight_names(self.checkpoint, config)
        shapes = {name: self.checkpoint.stored(stored).shape for name, stored in names.items()}
        return TowerScale.of(shapes, self.recipe.row_width(config))

    def disk(self) -> int:
        """Bytes that the bundle takes; of a backend that was not measured, those of its weights."""
        from vlexport.estimate import disk

        tower = self.tower_scale()
        if self.costs is None:
            return tower.stored(self.dtype, self.quantisation)
        return disk(self.costs, tower, self.dtype, self.quantisation)

    def foresee(self, tower: TowerScale, inputs: Sequence[TensorSpec]) -> DeviceNeeds | None:
        """What the engine takes of another device than this machine, where that can be told."""
        return self.backend.memory_estimate(self.options, tower, inputs, self.dtype)

    def target(self) -> Target:
        """What the bundle is for: the devices that were named, else this machine."""
        return self.backend.build_target(self.options, self.quantisation)

    def cannot_run(self) -> str | None:
        """Why the engine cannot be run where it is built, or None."""
        return self.backend.cannot_run(self.target())

    def enough(self) -> tuple[str, ...]:
        """Verdicts of a bundle that need not be built again; where none can be checked, one that waits."""
        return ("passed",) if self.cannot_run() is None else ("passed", "not_run")


def request(  # noqa: PLR0913  what the command line asks, word by word
    checkpoint: Checkpoint,
    *,
    recipe: str | None = None,
    backend: str = "onnxruntime",
    dtype: str = "float32",
    quantise: str | None = None,
    profile: str | ShapeProfile | MediaBounds | None = None,
    targets: Sequence[str] = (),
    limits: BuildLimits | None = None,
    into: str | Path = "engines",
) -> BuildRequest:
    """A checked request: the recipe serves the checkpoint, the backend serves precision, form and devices."""
    chosen, engine = recipe_for(checkpoint, recipe), find_backend(backend)
    able = require(engine, dtype, quantise)
    profiles = [profile] if isinstance(profile, ShapeProfile) else _profiles(chosen, checkpoint, profile)
    return BuildRequest(
        checkpoint=checkpoint,
        recipe=chosen,
        backend=engine,
        dtype=dtype,
        quantisation=able.quantisation,
        profile=union(profiles),
        options=_options(engine, targets, profiles, limits),
        into=Path(into),
    )


def _profiles(
    recipe: Recipe[Any], checkpoint: Checkpoint, name: str | MediaBounds | None
) -> list[ShapeProfile]:
    """Those of a name or of several, as in `image,video`; without any, the recipe's first."""
    config = recipe.read_config(checkpoint)
    if isinstance(name, MediaBounds):
        return [recipe.packing(config).profile("custom", name)]
    known = recipe.profiles(config)
    names = list(dict.fromkeys(name.split(","))) if name else [next(iter(known))]
    for each in names:
        if each not in known:
            raise UnsupportedError(
                f"recipe '{recipe.name}' has no profile '{each}'. It has: {', '.join(sorted(known))}."
            )
    return [known[each] for each in names]


def _options(
    backend: Backend, targets: Sequence[str], profiles: Sequence[ShapeProfile], limits: BuildLimits | None
) -> Options:
    if limits is not None and not backend.can_limit_builds:
        able = [name for name in backend_names() if find_backend(name).can_limit_builds]
        raise UnsupportedError(
            f"backend '{backend.name}' builds inside this process and cannot be held to limits. Leave "
            f"--build-seconds and --build-memory out; these can: {', '.join(able)}."
        )
    return backend.options(targets, profiles, limits)


def settled(asked: BuildRequest, progress: Progress) -> BuildRequest:
    """The request with the parts that stay float32: those that float16 could not hold on sample inputs."""
    if asked.islands is not None:
        return asked
    if asked.dtype != "float16":
        return replace(asked, islands={})
    from vlexport.parity.ranges import measure_islands

    progress("measure ranges", 0.0)
    return replace(asked, islands=measure_islands(asked.recipe, asked.checkpoint, asked.form))
