"""A graph or a checkpoint to a bundle: look for a finished one, else export, build, check and store."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vlexport.backends import (
    Backend,
    Engine,
    EngineSpec,
    Options,
    Payloads,
    Progress,
    find_backend,
    inside_of,
    require,
)
from vlexport.bundle import (
    BuildKey,
    Bundle,
    CheckpointIdentity,
    Manifest,
    Precision,
    RecipeIdentity,
    Staging,
    Verdict,
    entry_path,
    finished,
    key_of,
    staged,
)
from vlexport.bundle.os_errors import check_folder, explain_shortages
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.errors import BundleError, InputError, ParityError, UnsupportedError
from vlexport.request import BuildRequest, request, settled
from vlexport.sources import digest_with_imports

if TYPE_CHECKING:
    from torch import nn

    from vlexport.bundle import JsonObject
    from vlexport.graph import Graph
    from vlexport.parity import ParityReport
    from vlexport.parity.subject import Subject

__all__ = [
    "BuildRequest",
    "Built",
    "Progress",
    "build",
    "build_checkpoint",
    "build_key",
    "request",
    "store_verdict",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A bundle, which may have failed its check, and whether it was there before."""

    bundle: Bundle
    cached: bool

    def require_passed(self) -> Bundle:
        """Return the bundle, or raise a `ParityError` that says why it will not run.

        One that could not be run where it was built is no failure; what opens it asks for the check.
        """
        if not self.is_good:
            status, path = self.bundle.verdict.status, self.bundle.path
            raise ParityError(
                f"the engine was not shown to agree with the reference: the bundle is marked '{status}' and "
                f"will not run: {path}. `vlexport parity {path} --layers` shows where it goes wrong."
            )
        return self.bundle

    @property
    def is_good(self) -> bool:
        """Whether the check passed, or waits for a device because the backend cannot run the engine here."""
        status, target = self.bundle.verdict.status, self.bundle.manifest.target
        backend = find_backend(target.backend)
        return status == "passed" or (status == "not_run" and backend.cannot_run(target) is not None)


def build(
    graph: Graph,
    backend: str = "onnxruntime",
    *,
    into: str | Path = "engines",
    options: Options | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Build an engine from a graph, check it against the reference and store it; a finished one is reused."""
    quantise = graph.quantisation.name if graph.quantisation else None
    require(chosen := find_backend(backend), graph.dtype, quantise)
    if graph.form != chosen.form:
        raise UnsupportedError(
            f"the graph has attention form '{graph.form}', and backend '{backend}' wants '{chosen.form}'. "
            f"Export it with form='{chosen.form}'."
        )
    asked = BuildRequest(
        checkpoint=graph.checkpoint,
        recipe=graph.recipe,
        backend=chosen,
        dtype=graph.dtype,
        quantisation=graph.quantisation,
        profile=graph.profile,
        islands=graph.islands,
        options=options or Options(),
        into=Path(into),
    )
    return _build(asked, lambda _: graph, progress or _silent).require_passed()


def build_checkpoint(asked: BuildRequest, progress: Progress | None = None) -> Built:
    """The same from a checkpoint; nothing is exported when the bundle is there already."""
    return _build(asked, _trace, progress or _silent)


def _trace(asked: BuildRequest) -> Graph:
    from vlexport._export import export

    return export(
        asked.recipe,
        asked.checkpoint,
        profile=asked.profile,
        dtype=asked.dtype,
        form=asked.form,
        islands=asked.islands,
        quantisation=asked.quantisation,
    )


def build_key(asked: BuildRequest) -> BuildKey:
    """Everything that changes the result; hashes the tower's weights, and measures ranges if nobody has."""
    asked = settled(asked, _silent)
    config = asked.recipe.read_config(asked.checkpoint)
    weights = asked.recipe.weight_names(asked.checkpoint, config)
    versions, target = asked.backend.versions(), asked.target()
    return BuildKey(
        recipe=asked.recipe.name,
        recipe_digest=asked.recipe.digest,
        package_digest=_builders_digest(asked.backend),
        weights_digest=asked.checkpoint.digest(weights),
        config_digest=sha256(json.dumps(asked.checkpoint.config, sort_keys=True).encode()).hexdigest(),
        preprocessing=encode(config),
        backend=asked.backend.name,
        backend_version=target.version,
        torch_version=versions["torch"],
        exporter_versions=versions,
        dtype=asked.dtype,
        islands=asked.islands or {},
        quantisation=asked.quantise,
        attention_form=asked.form,
        profile=asked.profile,
        options=cast("JsonObject", asked.options.to_json()),
        target=target,
    )


def _builders_digest(backend: Backend) -> str:
    """Return the digest of the modules that make and check a bundle of this backend.

    Commands, generation, reports and other backends are left out: a change there leaves bundles usable.
    """
    makers = (__name__, type(backend).__module__, f"vlexport.backends.{backend.name}")
    return digest_with_imports(f"import {', '.join(makers)}".encode())


def _build(asked: BuildRequest, trace: Callable[[BuildRequest], Graph], progress: Progress) -> Built:
    check_folder(asked.into)
    asked = settled(asked, progress)
    progress("hash weights", 0.0)
    fields = build_key(asked)
    path, key = entry_path(asked.into, fields), key_of(fields)
    present = _usable(asked, path, key)
    if present is not None:
        return Built(bundle=present, cached=True)
    with (
        staged(asked.into, path.name, need=asked.disk()) as staging,
        explain_shortages(asked.into, staging.folder),
        compile_caches(staging.scratch),
    ):
        # Another process may have built it while this one waited for its turn.
        present = _usable(asked, path, key)
        if present is None:
            made = _make(asked, trace, staging, _Stamp(key=key, fields=fields, progress=progress))
            return Built(bundle=made, cached=False)
    return Built(bundle=present, cached=True)


def _usable(asked: BuildRequest, path: Path, key: str) -> Bundle | None:
    """Return a bundle of this key that passed its check: every byte as hashed, its table readable."""
    from vlexport.parity.report import ParityReport

    present = finished(path, key)
    if present is None or present.verdict.status not in asked.enough():
        return None
    try:
        bundle = Bundle.open(path)
        ParityReport.from_json(bundle.verdict.table)
    except (BundleError, InputError) as error:
        logger.warning("the entry is built again: %s", error)
        return None
    return bundle


@dataclass(frozen=True, kw_only=True)
class _Stamp:
    """What the manifest needs beside the graph, and who is told about phases."""

    key: str
    fields: BuildKey
    progress: Progress


def _make(
    asked: BuildRequest, trace: Callable[[BuildRequest], Graph], staging: Staging, stamp: _Stamp
) -> Bundle:
    stamp.progress("export", 0.0)
    graph = trace(asked)
    stamp.progress("build", 0.0)
    asked.backend.build(graph, asked.options, staging.folder, stamp.progress)
    manifest = _manifest(asked, graph, staging, stamp)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    program = None if asked.cannot_run() is None else graph.program.module()
    del graph
    stamp.progress("check", 0.0)
    if program is None:
        draft = staging.draft(manifest)
        with Engine(asked.backend.open(draft, spec, asked.options), spec) as engine:
            report = _checked(asked, engine, draft, stamp.progress)
    else:
        report = _unrun(asked, program, spec, staging.folder, stamp.progress)
    stamp.progress("store", 0.0)
    overwrite = _usable(asked, staging.final, stamp.key) is None
    return staging.publish(_with(manifest, report), overwrite=overwrite)


def _checked(asked: BuildRequest, engine: Engine, payloads: Payloads, progress: Progress) -> ParityReport:
    from vlexport.parity.check import diagnosed, run_checks

    def tell(name: str, share: float) -> None:
        progress(f"check {name}", share)

    subject = _subject(asked)
    report = run_checks(engine, subject, inside=inside_of(asked.backend, payloads), progress=tell)
    return report if report.passed else diagnosed(report, subject, engine, tell)


def _unrun(
    asked: BuildRequest, program: nn.Module, spec: EngineSpec, folder: Path, progress: Progress
) -> ParityReport:
    """The program that the engine was made from is held to the reference; the engine waits for its device."""
    from vlexport.parity.check import OfflineEngine, check_offline

    reason = asked.cannot_run()
    assert reason is not None
    unrun = OfflineEngine(
        program=program, spec=spec, proofs=asked.backend.network_checks(folder), reason=reason
    )
    return check_offline(unrun, _subject(asked), lambda name, share: progress(f"check {name}", share))


def _subject(asked: BuildRequest) -> Subject:
    from vlexport.parity.subject import Subject

    return Subject(
        recipe=asked.recipe,
        config=asked.recipe.read_config(asked.checkpoint),
        checkpoint=asked.checkpoint,
        form=asked.form,
        dtype=asked.dtype,
        quantisation=asked.quantisation,
        backend=asked.backend,
        islands=asked.islands or {},
    )


def _manifest(asked: BuildRequest, graph: Graph, staging: Staging, stamp: _Stamp) -> Manifest:
    return Manifest(
        key=stamp.key,
        recipe=RecipeIdentity(name=asked.recipe.name, digest=asked.recipe.digest),
        checkpoint=CheckpointIdentity(
            source=asked.checkpoint.source,
            revision=asked.checkpoint.revision,
            weights=stamp.fields.weights_digest,
        ),
        preprocessing=stamp.fields.preprocessing,
        position_rule=asked.recipe.position_rule,
        precision=Precision(dtype=asked.dtype, islands=graph.islands, quantisation=asked.quantise),
        attention_form=graph.form,
        profile=graph.profile,
        inputs=graph.inputs,
        outputs=graph.outputs,
        target=stamp.fields.target,
        versions=asked.backend.versions(),
        options=cast("JsonObject", asked.options.to_json()),
        files=staging.files(),
        parity=Verdict(status="not_run"),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _with(manifest: Manifest, report: ParityReport) -> Manifest:
    return replace(manifest, parity=Verdict(status=report.status, table=report.to_json()))


def store_verdict(
    bundle: Bundle, report: ParityReport, checkpoint: Checkpoint, recipe: str | None = None
) -> Bundle | None:
    """Keep the verdict of a new check for this user; None if it was of weights or settings not its own."""
    from vlexport.runtime.opening import recipe_of

    manifest, made = bundle.manifest, recipe_of(bundle, recipe)
    config = made.read_config(checkpoint)
    weights = checkpoint.digest(made.weight_names(checkpoint, config))
    if weights != manifest.checkpoint.weights or config != made.parse_config(manifest.preprocessing):
        return None
    return bundle.with_verdict(_with(manifest, report).parity)


@contextmanager
def compile_caches(folder: Path) -> Iterator[None]:
    """Keep what torch's compiler leaves behind in a private folder; one that the user chose is taken.

    torch makes its folder whenever it compiles or merely exports, in the temporary folder and for good.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        yield
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")
    try:
        yield
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def _silent(phase: str, share: float) -> None:
    logger.debug("%s %.0f%%", phase, 100 * share)
