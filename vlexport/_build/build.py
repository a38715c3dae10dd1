"""A checkpoint or a graph to a bundle: key, look up, export, compile, check, publish."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vlexport import processes
from vlexport._build.estimate import disk
from vlexport._build.graph import Graph
from vlexport._build.limits import needs_process, read_arguments, run_limited
from vlexport._build.memory import give_back
from vlexport._build.request import chosen_selector, request
from vlexport._build.sources import digest_with_imports
from vlexport._build.spec import BuildSpec
from vlexport._build.token_graphs import compiling, opened_graphs, planned_graphs, write_graphs
from vlexport.backends import (
    Backend,
    BuildLimits,
    ChecksNetwork,
    Engine,
    EngineSpec,
    Options,
    Progress,
    Runner,
    RunsPortable,
    backend_names,
    capability_of,
    find_backend,
    inside_of,
    log_progress,
    portable_of,
    require,
    runs_here,
)
from vlexport.bundle import (
    AdapterIdentity,
    BuildKey,
    Bundle,
    CheckpointIdentity,
    Manifest,
    Precision,
    RecipeIdentity,
    Staging,
    Trust,
    Verdict,
    entry_path,
    finished,
    key_of,
    remove_leftovers,
    staged,
)
from vlexport.bundle.user_folders import MOST_BYTES, forget
from vlexport.checkpoint import Checkpoint
from vlexport.codec import canonical, encode
from vlexport.errors import BundleError, InputError, ParityError, UnsupportedError
from vlexport.fields import checked
from vlexport.os_errors import check_folder, explain_shortages
from vlexport.parity.report import UNITS, report_in
from vlexport.report.card import CARD, card, licence_of
from vlexport.specs import MediaBounds, ShapeProfile, dtype_name

if TYPE_CHECKING:
    import torch

    from vlexport.codec import JsonObject
    from vlexport.parity.report import ParityReport
    from vlexport.target import Target

__all__ = ["BuildSpec", "Built", "build", "build_checkpoint", "build_key", "request", "store_verdict"]

logger = logging.getLogger(__name__)

# Rows of a report about graphs that may come from the user's cache.
GRAPHS = re.compile(r"graph|\.onnx$")


@dataclass(frozen=True, kw_only=True)
class Built:
    """A bundle, which may have failed its check, and whether it was there before."""

    bundle: Bundle
    cached: bool

    def require_passed(self) -> Bundle:
        """Return the bundle, or raise a `ParityError` with the reason why it will not run.

        A bundle that cannot run where it was built is no failure; opening it requires the check.
        """
        if not self.is_good:
            status, path = self.bundle.verdict.status, self.bundle.path
            raise ParityError(
                f"the engine was not shown to agree with the reference: the bundle is marked '{status}' and "
                f"will not run: {path}. {_reason(self.bundle)}{_instead(self.bundle)}"
                f"`{self.bundle.command('parity', '-v')}` repeats the check and prints every row."
            )
        return self.bundle

    @property
    def is_good(self) -> bool:
        """True if the check passed, or waits for a device because the backend cannot run the engine here."""
        target = self.bundle.manifest.target
        return self.bundle.verdict.status in enough(find_backend(target.backend), target)


def _reason(bundle: Bundle) -> str:
    """Return the first row that did not pass, with its number and its limit."""
    report = report_in(bundle.verdict)
    first = report.first_bad() if report else None
    return f"{first.told()}. " if first else ""


def _instead(bundle: Bundle) -> str:
    """Return what to build where the graph is right and the backend's arithmetic alone loses too much."""
    manifest, report = bundle.manifest, report_in(bundle.verdict)
    bad = [row for row in report.rows if row.exceeded()] if report else []
    if not bad or any(row.level not in ("L2", "L3") for row in bad):
        return ""
    worst = max(bad, key=lambda row: max(value / row.limits[name] for name, value in row.exceeded().items()))
    name, value = next(iter(worst.exceeded().items()))
    dtype, quantisation = manifest.precision.dtype, manifest.precision.quantisation
    others = [
        backend.name
        for backend in map(find_backend, backend_names())
        if (found := capability_of(backend, dtype, quantisation)) is not None
        and runs_here(backend, found.precision)
        and backend.name != manifest.target.backend
    ]
    wanted = quantisation or dtype
    elsewhere = f"{wanted} with --backend {' or '.join(others)}, or " if others else ""
    return (
        f"Its graph is right, and its arithmetic in {wanted} loses too much on '{worst.shapes}': {name} "
        f"{value:.2f}{UNITS.get(name, '')}, {worst.limits[name]:.2f} allowed. Build {elsewhere}float32. "
    )


def build(  # noqa: PLR0913  what the command line offers, in one place
    source: Graph | Checkpoint | str | Path,
    backend: str = "onnxruntime",
    *,
    dtype: str | torch.dtype | None = None,
    profile: str | ShapeProfile | MediaBounds | None = None,
    quantize: str | None = None,
    input_dtype: str | None = None,
    lora: str | Path | None = None,
    recipe: str | None = None,
    selector: str | None = None,
    targets: str | Sequence[str] = (),
    device: str | None = None,
    limits: BuildLimits | None = None,
    into: str | Path = "engines",
    options: Options | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Build an engine, check it against the reference and store it; a finished one is reused.

    source       a folder, `org/name[@revision]` on the Hub, an open checkpoint, or a graph of `export`
    backend      where it runs; `vlexport list` names those of this machine
    dtype        `float32` (default), `bfloat16` or `float16`; also `fp32`, `bf16`, `fp16`, or torch's own
    profile      sizes that it takes: names such as "image,video", or `MediaBounds(max_pixels=...)`
    quantize     `int8` for weights in 8 bits; `input_dtype`: `uint8` for pixels that the engine normalises
    lora         the folder of an adapter to fold in; `recipe`: a name or file instead of the family's own
    selector     the pruning method of videos; `targets`: GPUs to build for; `limits` of the build
    device       `cpu` (default) or `cuda` for the engine of `onnxruntime`
    into         the folder of bundles

        bundle = vlexport.build("Qwen/Qwen2.5-VL-3B-Instruct", "openvino", dtype="bf16", profile="image")
        pipeline = vlexport.load(bundle)
    """
    of_checkpoint = {
        "dtype": None if dtype is None else dtype_name(dtype),
        "profile": profile,
        "quantise": quantize,
        "input_dtype": input_dtype,
        "lora": lora,
        "recipe": recipe,
        "targets": (targets.split(",") if isinstance(targets, str) else targets) or None,
        "device": device,
        "limits": checked("limits", limits, BuildLimits | None),
    }
    checked("options", options, Options | None)
    given = {name: value for name, value in of_checkpoint.items() if value is not None}
    report = progress or log_progress
    if isinstance(source, Graph):
        if given:
            raise InputError(f"a Graph and {', '.join(given)} given; a graph has them from its export.")
        spec = _spec_of(source, backend, options, selector, into)
        return build_checkpoint(spec, report, source).require_passed()
    if needs_process(backend, limits):
        if options is not None:
            raise InputError(
                "options and a build in a process of its own given; expected one. Leave options out."
            )
        arguments = {"profile": None, "limits": None, **given, "checkpoint": source, "backend": backend}
        return build_limited({**arguments, "selector": selector, "into": into}, report).require_passed()
    spec = request(source, backend=backend, selector=selector, into=into, progress=report, **given)
    return build_checkpoint(replace(spec, options=options) if options else spec, report).require_passed()


def build_limited(arguments: Mapping[str, Any], progress: Progress = log_progress) -> Built:
    """Build with these arguments of `request` in a process of its own, held to the `limits` among them."""
    found = run_limited(f"{__name__}:build_job", arguments, progress)
    bundle = Bundle.open(found["bundle"], verify="lazy", trust=found["digest"])
    return Built(bundle=bundle, cached=found["cached"])


def build_job(job: str, progress: Progress) -> str:
    """Build in this process; return path, digest and origin of the bundle as JSON."""
    built = build_checkpoint(request(**read_arguments(job), progress=progress), progress)
    bundle = built.bundle
    return json.dumps({"bundle": str(bundle.path), "digest": bundle.digest, "cached": built.cached})


def _spec_of(
    graph: Graph, backend: str, options: Options | None, selector: str | None, into: str | Path
) -> BuildSpec:
    quantise = graph.quantisation.name if graph.quantisation else None
    require(chosen := find_backend(backend), graph.dtype, quantise, graph.input_dtype)
    if graph.form != chosen.form:
        raise UnsupportedError(
            f"the graph has attention form '{graph.form}', and backend '{backend}' wants '{chosen.form}'. "
            f"Export it with form '{chosen.form}'."
        )
    return BuildSpec(
        **graph.shared(),
        backend=chosen,
        options=options or Options(),
        selector=chosen_selector(graph.recipe, selector),
        tensors=graph.recipe.stored_tensors(graph.checkpoint, graph.config),
        into=Path(into),
    )


def build_checkpoint(spec: BuildSpec, progress: Progress = log_progress, graph: Graph | None = None) -> Built:
    """Build the bundle of a spec; nothing is exported when it is there already, or when `graph` is given.

    What an interrupted build of the same key finished is taken over: its engine, or a heavy tower's graph.
    """
    from vlexport._build.export import trace
    from vlexport.parity.check import OfflineEngine, check_offline, diagnosed, run_checks

    assert spec.backend is not None
    backend, precision = spec.backend, spec.precision
    check_folder(spec.into)
    Trust.of().probe()

    progress("hash weights", 0.0)
    fields = build_key(spec)
    path, key = entry_path(spec.into, fields), key_of(fields)

    verdicts = enough(backend, fields.target)
    present = _usable(path, key, verdicts)
    if present is not None:
        remove_leftovers(spec.into, path.name)
        return Built(bundle=present, cached=True)

    capability = capability_of(backend, fields.dtype, fields.quantisation)
    need = disk(capability.costs if capability else None, spec.scale, fields.dtype, precision.quantisation)
    with (
        staged(spec.into, path.name, key=key, need=need) as staging,
        explain_shortages(spec.into, staging.folder),
        processes.compile_caches(staging.scratch),
    ):
        # Another process may have built it while this one waited for its turn.
        present = _usable(path, key, verdicts)
        if present is not None:
            return Built(bundle=present, cached=True)

        manifest = staging.kept
        if manifest is not None:
            progress("resume", 0.0)
        else:
            # One core is idle while a heavy tower is traced.
            ahead = compiling(fields.graphs, staging.scratch, precision.dtype)
            with ahead if spec.heavy else nullcontext():
                graph = graph or _exported(spec, staging, progress)

                progress("build", 0.0)
                backend.build(graph, spec.options, staging.folder, progress)
                graphs = write_graphs(fields.graphs, staging.folder, graph.outputs[0].dtype)
            if isinstance(backend, RunsPortable):
                backend.write_portable(graph, spec.selector, staging.folder)

            manifest = Manifest(
                key=key,
                recipe=RecipeIdentity(name=spec.recipe.name, digest=spec.recipe.digest),
                checkpoint=_identity(spec, fields.weights_digest),
                preprocessing=fields.preprocessing,
                position_rule=spec.recipe.position_rule,
                precision=Precision(
                    dtype=precision.dtype, fp32_layers=precision.fp32_layers, quantisation=fields.quantisation
                ),
                attention_form=graph.form,
                graphs=graphs,
                profile=graph.profile,
                inputs=graph.inputs,
                outputs=graph.outputs,
                target=fields.target,
                versions=backend.versions(),
                options=fields.options,
                files=staging.files(),
                parity=Verdict(status="not_run"),
                created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            )
        staging.keep(manifest)

        progress("check", 0.0)

        def show_check(name: str, share: float) -> None:
            progress(f"check {name}", share)

        draft, cannot_run = staging.draft(manifest), backend.cannot_run(fields.target)
        try:
            tokens = opened_graphs(manifest.graphs, draft, manifest.outputs[0].dtype)
            portable = portable_of(backend, draft, spec.selector) if cannot_run is None else None
        except BundleError:
            _forget_graphs(staging.folder)
            raise
        interface = EngineSpec(inputs=manifest.inputs, outputs=manifest.outputs, profile=manifest.profile)
        if cannot_run is None:
            # Its weights are not needed in addition to those of the engine, nor these to the reference's.
            graph = None
            give_back(spec.size)

            def opened() -> Runner:
                return backend.open(draft, interface, spec.options)

            on_cpu = fields.target.device == "cpu"
            with Engine(None if on_cpu else opened(), interface, begin=opened if on_cpu else None) as engine:
                inside = inside_of(backend, draft)
                report = run_checks(
                    engine, spec, inside=inside, graphs=tokens, portable=portable, progress=show_check
                )
                if not report.passed:
                    report = diagnosed(report, spec, engine, show_check)
        else:
            checks = backend.network_checks(staging.folder) if isinstance(backend, ChecksNetwork) else {}
            program = (graph or trace(spec)).program.module()
            graph = None
            unrun = OfflineEngine(program=program, spec=interface, proofs=checks, reason=cannot_run)
            report = check_offline(unrun, spec, tokens, show_check)

        if any(row.verdict in ("failed", "blocked") and GRAPHS.search(row.check) for row in report.rows):
            _forget_graphs(staging.folder)
        progress("store", 0.0)
        manifest = replace(manifest, parity=_verdict(report))
        about = staging.add(CARD, card(manifest, path.name, licence_of(spec.checkpoint)).encode())
        manifest = replace(manifest, files={**manifest.files, CARD: about})
        return Built(
            bundle=staging.publish(manifest, overwrite=_usable(path, key, verdicts) is None), cached=False
        )


def _forget_graphs(folder: Path) -> None:
    """Remove the graphs of a build that failed from the user's cache, so that none is served twice."""
    files = [path for path in folder.iterdir() if path.is_file() and path.stat().st_size <= MOST_BYTES]
    for path in forget("graphs", (each.read_bytes() for each in files)):
        logger.warning("%s held a graph of the bundle that failed, and was removed: build again", path)


def _exported(spec: BuildSpec, staging: Staging, progress: Progress) -> Graph:
    """Trace the tower, or take over the graph of an interrupted build; keep that of a heavy one."""
    from vlexport._build.export import trace, with_weights, without_weights

    if staging.graph is not None:
        progress("resume", 0.0)
        staging.keep_graph(staging.graph)
        return with_weights(spec, staging.graph)
    progress("export", 0.0)
    graph = trace(spec)
    if spec.heavy:
        staging.keep_graph(without_weights(graph))
    return graph


def _identity(spec: BuildSpec, weights: str) -> CheckpointIdentity:
    checkpoint, adapter = spec.checkpoint, spec.checkpoint.adapter
    return CheckpointIdentity(
        source=checkpoint.location.place,
        revision=checkpoint.revision,
        weights=weights,
        adapter=AdapterIdentity(source=adapter.files.location.place, digest=adapter.digest)
        if adapter
        else None,
        quantised=checkpoint.quantised(each.name for each in spec.tensors.values()),
    )


def build_key(spec: BuildSpec) -> BuildKey:
    """Return everything that changes the result; hashes the tower's weights, and an adapter with them."""
    assert spec.backend is not None
    backend, precision = spec.backend, spec.precision
    target = backend.build_target(spec.options, precision)
    versions = backend.versions()
    weights = {name: each.name for name, each in spec.tensors.items()}
    # What makes and checks a bundle of this backend. Commands, generation, reports and other backends are
    # left out: a change there leaves bundles usable.
    makers = (__name__, type(backend).__module__, f"vlexport.backends.{backend.name}")
    return BuildKey(
        recipe=spec.recipe.name,
        recipe_digest=spec.recipe.digest,
        package_digest=digest_with_imports(f"import {', '.join(makers)}".encode()),
        weights_digest=spec.checkpoint.digest(weights),
        config_digest=sha256(json.dumps(spec.checkpoint.config, sort_keys=True).encode()).hexdigest(),
        preprocessing=encode(spec.config),
        backend=backend.name,
        backend_version=target.version,
        torch_version=versions["torch"],
        exporter_versions=versions,
        dtype=precision.dtype,
        fp32_layers=precision.fp32_layers,
        quantisation=precision.quantisation.name if precision.quantisation else None,
        attention_form=spec.form,
        graphs=planned_graphs(spec.selector, backend.rows_on),
        profile=spec.profile,
        options=cast("JsonObject", spec.options.to_json()),
        target=target,
    )


def enough(backend: Backend, target: Target) -> tuple[str, ...]:
    """Return the verdicts of a finished bundle; one that cannot run here waits for its check."""
    return ("passed",) if backend.cannot_run(target) is None else ("passed", "not_run")


def _usable(path: Path, key: str, verdicts: Collection[str]) -> Bundle | None:
    """Return the bundle of this key if its verdict is enough, every byte as hashed, its table readable."""
    from vlexport.parity.report import ParityReport

    present = finished(path, key)
    if present is None or present.verdict.status not in verdicts:
        return None
    try:
        bundle = Bundle.open(path)
        ParityReport.from_json(bundle.verdict.table)
    except (BundleError, InputError) as error:
        logger.warning("the entry is built again: %s", error)
        return None
    return bundle


def _verdict(report: ParityReport) -> Verdict:
    return Verdict(status=report.status, table=report.to_json())


def store_verdict(
    bundle: Bundle, report: ParityReport, checkpoint: Checkpoint, recipe: str | None = None
) -> Bundle | None:
    """Keep the verdict of a new check for this user; None if it was of weights or settings not its own."""
    from vlexport.runtime.opening import recipe_of

    manifest, made = bundle.manifest, recipe_of(bundle, recipe)
    config = made.read_config(checkpoint, manifest.input_dtype)
    weights = checkpoint.digest(made.weight_names(checkpoint, config))
    # As they are stored: settings that come from a manifest have tuples where those of files have lists.
    same = canonical(encode(config)) == canonical(encode(made.parse_config(manifest.preprocessing)))
    if weights != manifest.checkpoint.weights or not same:
        return None
    return bundle.with_verdict(_verdict(report), find_backend(manifest.target.backend).here(manifest.target))
