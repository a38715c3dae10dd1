"""A checkpoint or a graph to a bundle: key, look up, export, compile, check, publish."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport._build.estimate import disk
from vlexport._build.graph import Graph
from vlexport._build.key import build_key, enough, stored
from vlexport._build.limits import needs_process, read_arguments, run_limited
from vlexport._build.request import chosen_selector, measured, request
from vlexport._build.spec import BuildSpec
from vlexport._build.token_graphs import compiling, opened_graphs, write_graphs
from vlexport.backends import (
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
from vlexport.bundle import Bundle, Trust
from vlexport.bundle.manifest import (
    AdapterIdentity,
    BuildKey,
    CheckpointIdentity,
    Manifest,
    Precision,
    Proof,
    RecipeIdentity,
    Verdict,
    key_of,
)
from vlexport.bundle.store import Staging, check_tag, entry_for, remove_leftovers, staged, tag
from vlexport.bundle.trust import Programs, recall_program
from vlexport.bundle.user_folders import MOST_BYTES, CacheFile, forget
from vlexport.checkpoint import Checkpoint
from vlexport.codec import canonical, checked, encode
from vlexport.errors import BundleError, InputError, ParityError, UnsupportedError
from vlexport.parity.report import UNITS, report_in
from vlexport.reports.card import CARD, card, licence_of
from vlexport.specs import (
    BackendName,
    DeviceName,
    DtypeName,
    InputDtype,
    MethodName,
    ProfileName,
    Scheme,
    ShapeProfile,
    dtype_name,
)
from vlexport.system import ONE_BUILD, check_folder, compile_caches, give_back

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from vlexport.parity.report import ParityReport

logger = logging.getLogger(__name__)

# Rows of a report about graphs that may come from the user's cache.
GRAPHS = re.compile(r"graph|\.onnx$")


@dataclass(frozen=True, kw_only=True)
class Built:
    """A bundle, which may have failed its check, and whether it was there before."""

    bundle: Bundle
    cached: bool

    def require_passed(self) -> Bundle:
        """Return the bundle, or raise a `ParityError`; one that cannot run here is no failure."""
        if not self.is_good:
            status, path = self.bundle.verdict.status, self.bundle.path
            again = self.bundle.command("check", "--accuracy", "-v")
            raise ParityError(
                f"the engine was not shown to agree with the reference: the bundle is marked '{status}' and "
                f"will not run: {path}. {_reason(self.bundle)}{_instead(self.bundle)}"
                f"`{again}` repeats the check and prints every row."
            )
        return self.bundle

    @property
    def is_good(self) -> bool:
        """True if the check passed, or waits for a device because the backend cannot run the engine here."""
        target = self.bundle.manifest.target
        return self.bundle.verdict.status in enough(find_backend(target.backend), target)


def _reason(bundle: Bundle) -> str:
    report = report_in(bundle.verdict)
    first = report.first_bad() if report else None
    return f"{first.told()}. " if first else ""


def _instead(bundle: Bundle) -> str:
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
        if (capability := capability_of(backend, dtype, quantisation)) is not None
        and runs_here(backend, capability.precision)
        and backend.name != manifest.target.backend
    ]
    precision = quantisation or dtype
    elsewhere = f"{precision} with --backend {' or '.join(others)}, or " if others else ""
    return (
        f"Its graph is right, and its arithmetic in {precision} loses too much on '{worst.shapes}': {name} "
        f"{value:.2f}{UNITS.get(name, '')}, {worst.limits[name]:.2f} allowed. Build {elsewhere}float32. "
    )


def build(  # noqa: PLR0913  what the command line offers, in one place
    source: Graph | Checkpoint | str | Path,
    backend: BackendName = "onnxruntime",
    *,
    dtype: DtypeName | torch.dtype | None = None,
    profile: ProfileName | ShapeProfile | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_images: int | None = None,
    max_frames: int | None = None,
    quantize: Scheme | None = None,
    input_dtype: InputDtype | None = None,
    lora: str | Path | None = None,
    recipe: str | None = None,
    selector: MethodName | None = None,
    targets: str | Sequence[str] | None = None,
    device: DeviceName | None = None,
    build_seconds: float | None = None,
    build_memory: float | None = None,
    output_dir: str | Path = "engines",
    name: str | None = None,
    options: Options | None = None,
    most_error: float | None = None,
    media: Sequence[object] = (),
    progress: Progress | None = None,
) -> Bundle:
    """Build an engine, check it against the reference and store it; a finished one is reused.

    source       a folder, `org/name[@revision]` on the Hub, an open checkpoint, or a graph of `export`
    backend      where it runs; `vlexport doctor` names those of this machine. `auto` is what `choose` finds
    dtype        `float32` (default), `bfloat16` or `float16`; also `fp32`, `bf16`, `fp16`, or torch's own
    profile      sizes that it takes, by names such as "image,video"
    max_pixels   of an image or frame, in place of a profile; `min_pixels`, `max_images` and `max_frames` too
    quantize     `int8` for weights in 8 bits; `input_dtype`: `uint8` for pixels that the engine normalises
    lora         the folder of an adapter to fold in; `recipe`: a name or file instead of the family's own
    selector     the pruning method of videos; `targets`: GPUs to build for
    device       `cpu` (default) or `cuda` for the engine of `onnxruntime`
    build_memory GiB that a build may take, `build_seconds` how long
    output_dir   the folder of bundles; `name`: one beside the bundle's own, a link
    most_error   the bound for `auto`, 0.01 by default; `media`: images and videos that it measures on

        bundle = vlexport.build("Qwen/Qwen2.5-VL-3B-Instruct", "openvino", dtype="bf16", profile="image")
        pipeline = vlexport.load(bundle)
    """
    checked("options", options, Options | None)
    options_given: dict[str, Any] = {
        "dtype": None if dtype is None else dtype_name(dtype), "profile": profile, "min_pixels": min_pixels,
        "max_pixels": max_pixels, "max_images": max_images, "max_frames": max_frames, "quantize": quantize,
        "input_dtype": input_dtype, "lora": lora, "recipe": recipe, "targets": targets or None,
        "device": device, "build_seconds": build_seconds, "build_memory": build_memory,
        "most_error": most_error, "media": media or None,
    }  # fmt: skip
    arguments = {option: value for option, value in options_given.items() if value is not None}
    place = {"backend": backend, "selector": selector, "output_dir": output_dir}
    if name is not None:
        check_tag(Path(output_dir), name)
    bundle = _built(source, arguments, place, options, progress or log_progress).require_passed()
    if name is not None:
        tag(bundle.path, name)
    return bundle


def _built(
    source: Graph | Checkpoint | str | Path,
    arguments: Mapping[str, Any],
    place: Mapping[str, Any],
    options: Options | None,
    progress: Progress,
) -> Built:
    if isinstance(source, Graph):
        if arguments:
            raise InputError(f"a Graph and {', '.join(arguments)} given; a graph has them from its export.")
        return build_checkpoint(_spec_of(source, options=options, **place), progress, source)
    arguments, choice = measured({**arguments, **place, "checkpoint": source}, progress)
    arguments |= choice.best.arguments() if choice else {}
    if needs_process(arguments):
        if options is not None:
            raise InputError("options and a process of its own given; expected one. Leave options out.")
        return build_limited(arguments, progress)
    spec = request(**arguments, progress=progress)
    return build_checkpoint(replace(spec, options=options) if options else spec, progress)


def build_limited(arguments: Mapping[str, Any], progress: Progress = log_progress) -> Built:
    """Build with these arguments of `request` in a process of its own, within the `limits` among them."""
    result = run_limited(f"{__name__}:build_job", arguments, progress)
    bundle = Bundle.open(result["bundle"], verify="lazy", trust=result["digest"])
    return Built(bundle=bundle, cached=result["cached"])


def build_job(job: str, progress: Progress) -> str:
    """Build in this process; return path, digest and origin of the bundle as JSON."""
    built = build_checkpoint(request(**read_arguments(job), progress=progress), progress)
    bundle = built.bundle
    return json.dumps({"bundle": str(bundle.path), "digest": bundle.digest, "cached": built.cached})


def _spec_of(
    graph: Graph, *, backend: str, options: Options | None, selector: str | None, output_dir: str | Path
) -> BuildSpec:
    quantize = graph.quantisation.name if graph.quantisation else None
    require(chosen := find_backend(backend), graph.dtype, quantize, graph.input_dtype)
    if graph.form != chosen.form:
        raise UnsupportedError(
            f"the graph has attention form '{graph.form}', and backend '{backend}' wants '{chosen.form}'. "
            f"Export it with form '{chosen.form}'."
        )
    takes_cells = graph.recipe.packing(graph.config).takes_cells
    method, cells = chosen_selector(graph.recipe, selector, takes_cells=takes_cells)
    return BuildSpec(
        **graph.shared(),
        backend=chosen,
        options=options or Options(),
        selector=method,
        cells=cells,
        tensors=graph.recipe.stored_tensors(graph.checkpoint, graph.config),
        output_dir=Path(output_dir),
    )


def build_checkpoint(spec: BuildSpec, progress: Progress = log_progress, graph: Graph | None = None) -> Built:
    """Build the bundle of a spec, or return the one that is there; nothing is exported if `graph` is given.

    What an interrupted build of the same key finished is taken over: its engine, or a heavy tower's graph.
    """
    assert spec.backend is not None
    check_folder(spec.output_dir)
    Trust.of().probe()

    progress("hash weights", 0.0)
    key = build_key(spec)
    path, digest = entry_for(spec.output_dir, key, spec.model), key_of(key)
    verdicts = enough(spec.backend, key.target)
    if (bundle := stored(path, digest, verdicts)) is not None:
        remove_leftovers(spec.output_dir, path.name)
        return _remembered(spec, bundle, cached=True)

    capability = capability_of(spec.backend, key.dtype, key.quantisation)
    need = disk(capability.costs if capability else None, spec.scale, key.dtype, spec.quantisation)
    with (
        ONE_BUILD,
        staged(spec.output_dir, path.name, key=digest, need=need) as staging,
        compile_caches(staging.scratch),
    ):
        # Another build may have stored it while this one waited for its turn.
        if (bundle := stored(path, digest, verdicts)) is not None:
            return _remembered(spec, bundle, cached=True)
        program = None
        if (manifest := staging.kept) is not None:
            progress("resume", 0.0)
        else:
            manifest, program = _engine(spec, key, staging, progress, graph)
        report, proof, added = _check(spec, manifest, staging, progress, program)
        progress("store", 0.0)
        manifest = replace(manifest, parity=_verdict(report), proof=proof)
        added[CARD] = card(manifest, path.name, licence_of(spec.checkpoint)).encode()
        about = {name: staging.add(name, content) for name, content in added.items()}
        manifest = replace(manifest, files={**manifest.files, **about})
        bundle = staging.publish(manifest)
        _kept_graph(digest).discard()
        return _remembered(spec, bundle, cached=False)


def _remembered(spec: BuildSpec, bundle: Bundle, *, cached: bool) -> Built:
    """Return the result of a build, whose private files later commands find by its digest."""
    for kind, part in (("recipe", spec.recipe), ("backend", spec.backend)):
        if part is not None and part.file is not None:
            Programs.of().remember(bundle.digest, kind, part.file)
    return Built(bundle=bundle, cached=cached)


def _engine(
    spec: BuildSpec, key: BuildKey, staging: Staging, progress: Progress, graph: Graph | None
) -> tuple[Manifest, ExportedProgram | None]:
    assert spec.backend is not None
    backend, precision = spec.backend, spec.precision
    with compiling(key.graphs, staging.scratch, precision.dtype):
        graph = graph or _exported(spec, _kept_graph(key_of(key)), progress)
        progress("build", 0.0)
        backend.build(graph, spec.options, staging.folder, progress)
        progress("graphs", 0.0)
        if isinstance(backend, RunsPortable):
            backend.write_portable(graph, spec.selector, staging.folder, spec.cells)
        graphs = write_graphs(key.graphs, staging.folder, graph.outputs[0].dtype)
    manifest = Manifest(
        key=key_of(key),
        recipe=RecipeIdentity(name=spec.recipe.name, digest=spec.recipe.digest),
        checkpoint=_identity(spec, key.weights_digest),
        preprocessing=key.preprocessing,
        position_rule=spec.recipe.position_rule,
        precision=Precision(
            dtype=precision.dtype, fp32_layers=precision.fp32_layers, quantisation=key.quantisation
        ),
        attention_form=graph.form,
        graphs=graphs,
        profile=graph.profile,
        inputs=graph.inputs,
        outputs=graph.outputs,
        target=key.target,
        versions=backend.versions(),
        options=key.options,
        files=staging.files(),
        parity=Verdict(status="not_run"),
        proof=Proof(),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    return manifest, graph.program if backend.cannot_run(key.target) else None


def _check(
    spec: BuildSpec,
    manifest: Manifest,
    staging: Staging,
    progress: Progress,
    program: ExportedProgram | None,
) -> tuple[ParityReport, Proof, dict[str, bytes]]:
    """Return the report of the check, and of an engine that passed its proof and the proof's files."""
    from vlexport._build.export import trace
    from vlexport.parity.check import OfflineEngine, check_offline, diagnosed, run_checks
    from vlexport.parity.proof import proof_of

    assert spec.backend is not None
    draft, backend = staging.keep(manifest), spec.backend

    def show_check(name: str, share: float) -> None:
        progress(f"check {name}", share)

    progress("check", 0.0)
    interface = EngineSpec(inputs=manifest.inputs, outputs=manifest.outputs, profile=manifest.profile)
    cannot_run = backend.cannot_run(manifest.target)
    proofs = list[tuple[Proof, dict[str, bytes]]]()
    try:
        tokens = opened_graphs(manifest.graphs, draft, manifest.outputs[0].dtype)
        portable = portable_of(backend, draft, spec.selector, spec.cells) if cannot_run is None else None
    except BundleError:
        _forget_graphs(staging.folder)
        raise
    if cannot_run is None:
        # Weights of the trace are not needed beside those of the engine, nor these beside the reference.
        give_back(spec.size)

        def opened() -> Runner:
            return backend.open(draft, interface, spec.options)

        on_cpu = manifest.target.device == "cpu"
        with Engine(None if on_cpu else opened(), interface, begin=opened if on_cpu else None) as engine:
            inside = inside_of(backend, draft)
            report = run_checks(
                engine,
                spec,
                inside=inside,
                graphs=tokens,
                portable=portable,
                progress=show_check,
                then=lambda checker: proofs.append(proof_of(checker, manifest)),
            )
            if not report.passed:
                report = diagnosed(report, spec, engine, show_check)
    else:
        module = (program or trace(spec).program).module()
        parsed = backend.network_checks(staging.folder) if isinstance(backend, ChecksNetwork) else {}
        unrun = OfflineEngine(program=module, spec=interface, proofs=parsed, reason=cannot_run)
        report = check_offline(unrun, spec, tokens, show_check)
    if any(row.verdict in ("failed", "blocked") and GRAPHS.search(row.check) for row in report.rows):
        _forget_graphs(staging.folder)
    return report, *(proofs or [(Proof(), {})])[0]


def _forget_graphs(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.is_file() and path.stat().st_size <= MOST_BYTES]
    for path in forget("graphs", (file.read_bytes() for file in files)):
        logger.warning("%s held a graph of the bundle that failed, and was removed: build again", path)


def _kept_graph(key: str) -> CacheFile:
    return CacheFile.of("exports", key)


def _exported(spec: BuildSpec, kept: CacheFile, progress: Progress) -> Graph:
    """Trace the tower; a heavy one takes long, so its graph is kept until the bundle is stored."""
    from vlexport._build.export import trace, with_weights, without_weights

    if spec.heavy and (content := recall_program(kept)) is not None:
        progress("resume", 0.0)
        return with_weights(spec, content)
    progress("export", 0.0)
    graph = trace(spec)
    if spec.heavy:
        kept.keep(without_weights(graph))
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
        quantised=checkpoint.quantised(tensor.name for tensor in spec.tensors.values()),
    )


def _verdict(report: ParityReport) -> Verdict:
    return Verdict(status=report.status, table=report.to_json())


def store_verdict(
    bundle: Bundle, report: ParityReport, checkpoint: Checkpoint, recipe: str | None = None
) -> Bundle | None:
    """Keep the verdict of a new check for this user; None if it was of weights or settings not its own."""
    from vlexport.runtime.opening import recipe_of

    manifest, built_by = bundle.manifest, recipe_of(bundle, recipe)
    config = built_by.read_config(checkpoint, manifest.input_dtype)
    weights = checkpoint.digest(built_by.weight_names(checkpoint, config))
    # As they are stored: settings that come from a manifest have tuples where those of files have lists.
    same = canonical(encode(config)) == canonical(encode(built_by.parse_config(manifest.preprocessing)))
    if weights != manifest.checkpoint.weights or not same:
        return None
    return bundle.with_verdict(_verdict(report), find_backend(manifest.target.backend).here(manifest.target))
