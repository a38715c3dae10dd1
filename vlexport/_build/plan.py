"""Forecast of a build before it is made: shapes, padding, disk, memory, cache hit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlexport._build import estimate
from vlexport._build.estimate import Costs, DeviceNeeds
from vlexport._build.export import example_inputs, specs_of
from vlexport._build.key import build_key, enough
from vlexport._build.spec import BuildSpec
from vlexport._build.timings import expected_build
from vlexport.backends import capability_of
from vlexport.bundle.manifest import key_of
from vlexport.bundle.store import entry_for, finished
from vlexport.checkpoint.names import ModuleMapping
from vlexport.codec import encode
from vlexport.parity.samples import (
    MAX_PATCHES,
    MAX_PATCHES_HEAVY,
    SampleRules,
    blank,
    largest_sample,
    token_symbol,
)
from vlexport.specs import ShapeProfile, TensorSpec
from vlexport.system import check_folder


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

    adapter    source and digest of the LoRA that is folded in
    quantised  how the checkpoint stores the tower, where that is no floating dtype
    patches  of the smallest, the usual and the largest call
    device   what the engine takes of a GPU, for backends that build for others
    padding  the largest share of computed attention scores that are padding, by kind of block
    modules  prefixes of the checkpoint's tower, connector and language model
    merges   rows of the tower, and the tokens that the connector makes of them
    seconds  of a build with its check, and what that is known from
    """

    path: Path
    cached: bool
    profile: ShapeProfile
    inputs: tuple[TensorSpec, ...]
    patches: tuple[int, int, int]
    padding: Mapping[str, float]
    needs: Needs | None
    modules: ModuleMapping
    merges: tuple[int, int]
    seconds: tuple[float, str]
    device: DeviceNeeds | None = None
    adapter: tuple[str, str] | None = None
    quantised: str | None = None

    def to_json(self) -> dict[str, object]:
        ranges = {str(symbol): [r.min, r.opt, r.max] for symbol, r in self.profile.ranges.items()}
        needs = self.needs
        return {
            "path": str(self.path),
            "cached": self.cached,
            "adapter": dict(zip(("source", "digest"), self.adapter, strict=True)) if self.adapter else None,
            "quantised": self.quantised,
            "profile": {"name": self.profile.name, "ranges": ranges},
            "inputs": [[spec.name, spec.dtype, [str(dim) for dim in spec.shape]] for spec in self.inputs],
            "patches": list(self.patches),
            "padding": dict(self.padding),
            "modules": encode(self.modules),
            "merges": list(self.merges),
            "disk_bytes": needs.disk if needs else None,
            "build_memory_bytes": needs.build_memory if needs else None,
            "run_memory_bytes": list(needs.run_memory) if needs else None,
            "origin": needs.origin if needs else None,
            "build_seconds": round(self.seconds[0], 1),
            "device": self.device.to_json() if self.device else None,
        }


def forecast(spec: BuildSpec) -> Forecast:
    """Forecast a build. Hashes the tower's weights for the bundle's name; builds and writes nothing."""
    assert spec.backend is not None
    check_folder(spec.output_dir)
    fields = build_key(spec)
    path = entry_for(spec.output_dir, fields, spec.model)
    present = finished(path, key_of(fields))
    axes = spec.recipe.axes(spec.config, spec.form)
    inputs = specs_of(example_inputs(spec.recipe, spec.config, spec.dtype, spec.form), axes)
    rows = spec.profile.range_of(next(tensor.shape[0] for tensor in inputs if tensor.name == "patches"))
    patches = (rows.min, rows.opt, rows.max)
    tokens = spec.packing.queried.queries if spec.packing.queried else 1
    capability = capability_of(spec.backend, fields.dtype, fields.quantisation)
    costs = capability.costs if capability else None
    adapter = spec.checkpoint.adapter
    kind = fields.quantisation or fields.dtype
    expected, known = expected_build(spec.backend.name, kind, spec.scale.num_weights)
    return Forecast(
        path=path,
        adapter=(adapter.source, adapter.digest) if adapter else None,
        quantised=spec.checkpoint.quantised(tensor.name for tensor in spec.tensors.values()),
        cached=present is not None and present.verdict.status in enough(spec.backend, fields.target),
        profile=spec.profile,
        inputs=inputs,
        patches=patches,
        padding=_padding(spec),
        needs=_needs(spec, costs, inputs, patches) if costs else None,
        modules=spec.recipe.module_names(spec.checkpoint),
        merges=(spec.packing.encoder_tokens(tokens), tokens),
        seconds=(sum(expected.phases.values()), known),
        device=spec.backend.memory_estimate(spec.options, spec.scale, inputs, spec.dtype),
    )


def _needs(
    spec: BuildSpec, costs: Costs, inputs: tuple[TensorSpec, ...], patches: tuple[int, int, int]
) -> Needs:
    precision = (spec.dtype, spec.quantisation)
    low, usual, high = (estimate.run_memory(costs, spec.scale, count, *precision) for count in patches)
    first = spec.packing.outputs[0]
    tokens = spec.recipe.axes(spec.config, spec.form)[first][0]
    # The largest sample of the accuracy check.
    rules = SampleRules(
        profile=spec.profile,
        inputs=inputs,
        tokens=token_symbol((TensorSpec(name=first, dtype="", shape=(tokens,)),)),
        form=spec.form,
        max_patches=MAX_PATCHES_HEAVY if spec.heavy else MAX_PATCHES,
    )
    checked = largest_sample(spec.recipe, spec.config, rules)
    return Needs(
        disk=estimate.disk(costs, spec.scale, *precision),
        build_memory=estimate.build_memory(costs, spec.scale, checked),
        run_memory=(low, usual, high),
        origin=costs.origin,
    )


def _padding(spec: BuildSpec) -> dict[str, float]:
    worst: dict[str, float] = {}
    for mix in spec.recipe.shape_sets(spec.config).values():
        items = [blank(spec.recipe, spec.config, kind, grid) for kind, grid in mix]
        for kind, (computed, needed) in spec.packing.attention_work(items, spec.form).items():
            worst[kind] = max(worst.get(kind, 0.0), computed / needed - 1)
    return worst
