"""The key of a build, and the bundle that it finds: whatever changes the result is in the key."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vlexport._build.sources import digest_with_imports
from vlexport._build.spec import BuildSpec
from vlexport._build.token_graphs import planned_graphs
from vlexport.backends import Backend
from vlexport.bundle import Bundle
from vlexport.bundle.manifest import BuildKey
from vlexport.bundle.store import finished
from vlexport.codec import encode
from vlexport.errors import BundleError, InputError

if TYPE_CHECKING:
    from vlexport.codec import JsonObject
    from vlexport.target import Target

logger = logging.getLogger(__name__)


def build_key(spec: BuildSpec) -> BuildKey:
    """Return everything that changes the result; hashes the tower's weights, and an adapter with them."""
    assert spec.backend is not None
    backend, precision = spec.backend, spec.precision
    target = backend.build_target(spec.options, precision)
    versions = backend.versions()
    weights = {name: tensor.name for name, tensor in spec.tensors.items()}
    # What makes and checks a bundle of this backend. Commands, generation, reports and other backends are
    # left out: a change there leaves bundles usable.
    makers = ("vlexport._build.build", type(backend).__module__, f"vlexport.backends.{backend.name}")
    own = backend.file.read_bytes() if backend.file else b""
    return BuildKey(
        recipe=spec.recipe.name,
        recipe_digest=spec.recipe.digest,
        package_digest=digest_with_imports(f"import {', '.join(makers)}\n".encode() + own),
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
        graphs=planned_graphs(spec.selector, backend.rows_on, spec.cells),
        profile=spec.profile,
        options=cast("JsonObject", spec.options.to_json()),
        target=target,
    )


def enough(backend: Backend, target: Target) -> tuple[str, ...]:
    """Return the verdicts of a finished bundle; one that cannot run here waits for its check."""
    return ("passed",) if backend.cannot_run(target) is None else ("passed", "not_run")


def stored(path: Path, key: str, verdicts: Collection[str]) -> Bundle | None:
    """Return the bundle of this key if its verdict is enough, every byte as hashed, its table readable."""
    from vlexport.parity.report import ParityReport

    bundle = finished(path, key)
    if bundle is None or bundle.verdict.status not in verdicts:
        return None
    try:
        ParityReport.from_json(bundle.verdict.table)
        return Bundle.open(path)
    except (BundleError, InputError) as error:
        logger.warning("the entry is built again: %s", error)
        return None
