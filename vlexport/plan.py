"""Forecast of a build before it is made: shapes, padding, disk, memory, cache hit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlexport import estimate
from vlexport._build import build_key
from vlexport._export import blank_item, example_inputs
from vlexport.bundle import entry_path, finished, key_of
from vlexport.bundle.os_errors import check_folder
from vlexport.estimate import Costs, DeviceNeeds, TowerScale
from vlexport.parity.samples import SampleRules, largest_sample, token_symbol
from vlexport.parity.subject import HEAVY, MAX_PATCHES, MAX_PATCHES_HEAVY
from vlexport.request import BuildRequest
from vlexport.specs import ShapeProfile, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes of a build: on disk, at the peak of the build, and at the peak of calls of three sizes."""

    disk: int
    build_memory: int
    run_memory: tuple[int, int, int]
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Forecast of a build; `needs` is None for backends without measurements.

    patches  of the smallest, the usual and the largest call
    device   what the engine takes of a GPU, for backends that build for others
    padding  the largest share of computed attention scores that are padding, by kind of block
    """

    path: Path
    cached: bool
    profile: ShapeProfile
    inputs: tuple[TensorSpec, ...]
    patches: tuple[int, int, int]
    padding: Mapping[str, float]
    needs: Needs | None
    device: DeviceNeeds | None = None

    def to_json(self) -> dict[str, object]:
        ranges = {str(symbol): [r.min, r.opt, r.max] for symbol, r in self.profile.ranges.items()}
        needs = self.needs
        return {
            "path": str(self.path),
            "cached": self.cached,
            "profile": {"name": self.profile.name, "ranges": ranges},
            "inputs": [[spec.name, spec.dtype, [str(dim) for dim in spec.shape]] for spec in self.inputs],
            "patches": list(self.patches),
            "padding": dict(self.padding),
            "disk_bytes": needs.disk if needs else None,
            "build_memory_bytes": needs.build_memory if needs else None,
            "run_memory_bytes": list(needs.run_memory) if needs else None,
            "origin": needs.origin if needs else None,
            "device": self.device.to_json() if self.device else None,
        }


def forecast(asked: BuildRequest) -> Forecast:
    """Forecast a build. Hashes the tower's weights for the bundle's name; builds and writes nothing."""
    check_folder(asked.into)
    fields = build_key(asked)
    path = entry_path(asked.into, fields)
    present = finished(path, key_of(fields))
    inputs = _inputs(asked)
    rows = asked.profile.range_of(next(spec.shape[0] for spec in inputs if spec.name == "patches"))
    patches = (rows.min, rows.opt, rows.max)
    costs, tower = asked.costs, asked.tower_scale()
    return Forecast(
        path=path,
        cached=present is not None and present.verdict.status in asked.enough(),
        profile=asked.profile,
        inputs=inputs,
        patches=patches,
        padding=_padding(asked),
        needs=_needs(asked, costs, inputs, patches) if costs else None,
        device=asked.foresee(tower, inputs),
    )


def _needs(
    asked: BuildRequest, costs: Costs, inputs: tuple[TensorSpec, ...], patches: tuple[int, int, int]
) -> Needs:
    tower = asked.tower_scale()
    precision = (asked.dtype, asked.quantisation)
    low, usual, high = (estimate.run_memory(costs, tower, count, *precision) for count in patches)
    return Needs(
        disk=asked.disk(),
        build_memory=estimate.build_memory(costs, tower, _checked(asked, inputs, tower)),
        run_memory=(low, usual, high),
        origin=costs.origin,
    )


def _checked(asked: BuildRequest, inputs: tuple[TensorSpec, ...], tower: TowerScale) -> int:
    """Return the number of patches of the largest sample of the accuracy check."""
    config = asked.recipe.read_config(asked.checkpoint)
    first = asked.recipe.packing(config).outputs[0]
    rows = TensorSpec(name=first, dtype="", shape=(asked.recipe.axes(config, asked.form)[first][0],))
    rules = SampleRules(
        profile=asked.profile,
        inputs=inputs,
        tokens=token_symbol((rows,)),
        form=asked.form,
        max_patches=MAX_PATCHES_HEAVY if tower.num_weights > HEAVY else MAX_PATCHES,
    )
    return largest_sample(asked.recipe, config, rules)


def _padding(asked: BuildRequest) -> dict[str, float]:
    """Return the worst padding over the recipe's sample mixes, by kind of block."""
    config = asked.recipe.read_config(asked.checkpoint)
    worst: dict[str, float] = {}
    for mix in asked.recipe.shape_sets(config).values():
        items = [blank_item(asked.recipe, config, kind, grid) for kind, grid in mix]
        for kind, (computed, needed) in (
            asked.recipe.packing(config).attention_work(items, asked.form).items()
        ):
            worst[kind] = max(worst.get(kind, 0.0), computed / needed - 1)
    return worst


def _inputs(asked: BuildRequest) -> tuple[TensorSpec, ...]:
    config: Any = asked.recipe.read_config(asked.checkpoint)
    axes = asked.recipe.axes(config, asked.form)
    return tuple(
        TensorSpec(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(axes.get(name, {}).get(axis, size) for axis, size in enumerate(tensor.shape)),
        )
        for name, tensor in example_inputs(asked.recipe, config, asked.dtype, asked.form).items()
    )
