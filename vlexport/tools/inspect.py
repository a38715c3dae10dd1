"""Descriptions of bundles and checkpoints from JSON and headers alone: nothing is loaded or run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict, cast

from vlexport.bundle import Bundle, Inspection, command
from vlexport.bundle.files import MANIFEST_NAME, NETWORK_NAME
from vlexport.checkpoint import Checkpoint
from vlexport.codec import Json, encode
from vlexport.errors import BundleError, InputError, VlexportError
from vlexport.recipe import RecipeCard, card_for, find_recipe, tried_classes
from vlexport.reports.facts import BundleFacts

# Fields of a manifest that are described as they stand there.
SHOWN = (
    "recipe", "checkpoint", "precision", "attention_form", "position_rule", "graphs", "profile", "target",
    "inputs", "outputs", "versions", "created",
)  # fmt: skip
# The accuracy table has findings, the target has the rest.
KNOWN_ELSEWHERE = ("findings", "library", "targets", "version")


class BundleDescription(TypedDict, total=False):
    """Facts about a bundle: the fields of a manifest as they stand there, whatever a foreign one holds."""

    kind: str
    path: str
    digest: str
    trusted: bool
    problem: str | None
    contents: str
    parity: str | None
    summary: str | None
    recipe: Json
    checkpoint: Json
    precision: Json
    attention_form: Json
    position_rule: Json
    graphs: Json
    profile: Json
    target: Json
    inputs: Json
    outputs: Json
    versions: Json
    created: Json
    forms: dict[str, str]
    files: dict[str, Json]
    network: dict[str, Json]


class CheckpointDescription(TypedDict):
    """Facts about a checkpoint, from its config and the names of its tensors."""

    kind: str
    path: str
    revision: str | None
    model_type: str
    recipe: str | None
    problem: str | None
    modules: dict[str, Json]
    remote_code: list[str]
    quantised: str | None
    tensors: int
    tensors_by_prefix: dict[str, int]


def inspect(source: str | Path) -> BundleDescription | CheckpointDescription:
    """Describe a bundle or a checkpoint; of foreign, newer or damaged bundles as much as is readable.

    Nothing is loaded or run, and nothing has to be trusted.

        vlexport.inspect("engines/BUNDLE")["digest"]
    """
    path = Path(source)
    if (path / MANIFEST_NAME).exists():
        return _bundle(Bundle.inspect(path))
    return _checkpoint(Checkpoint.open(source))


def _bundle(inspection: Inspection) -> BundleDescription:
    parts = inspection.content
    parity = parts.get("parity")
    status = parity.get("status") if isinstance(parity, Mapping) else None
    summary: dict[str, object] = {
        "kind": "bundle",
        "path": str(inspection.path),
        "digest": inspection.digest,
        "trusted": inspection.trusted,
        "problem": inspection.problem,
        "contents": "sizes compared, bytes not hashed; run: "
        f"{command(inspection.path, inspection.manifest, 'check')}",
        "parity": inspection.checked.status if inspection.checked else status,
        "summary": _accuracy(inspection),
    }
    summary |= {name: parts.get(name) for name in SHOWN}
    if (manifest := inspection.manifest) is not None:
        summary["forms"] = manifest.graphs.forms(manifest.position_rule)
    files = parts.get("files")
    if isinstance(files, Mapping):
        sizes = {name: record.get("size") for name, record in files.items() if isinstance(record, Mapping)}
        summary["files"] = sizes
    return cast("BundleDescription", encode(summary | _network(inspection)))


def _accuracy(inspection: Inspection) -> str | None:
    manifest = inspection.manifest
    if manifest is None:
        return None
    try:
        return BundleFacts.built(manifest, inspection.checked or manifest.parity).summary
    except InputError as error:
        return str(error)


def _network(inspection: Inspection) -> dict[str, object]:
    manifest = inspection.manifest
    if manifest is None or NETWORK_NAME not in manifest.files or inspection.problem is not None:
        return {}
    try:
        stored = inspection.read_json(NETWORK_NAME)
    except (InputError, BundleError) as error:
        return {"problem": str(error)}
    return {"network": {name: value for name, value in stored.items() if name not in KNOWN_ELSEWHERE}}


def _checkpoint(checkpoint: Checkpoint) -> CheckpointDescription:
    card = card_for(checkpoint.model_type)
    exporting = {row["model_type"] for row in tried_classes()["classes"] if row["exports"]}
    recipe = card.name if card else "generic" if checkpoint.model_type in exporting else None
    names = checkpoint.tensor_names()
    tops = Counter(".".join(name.split(".")[:2]) for name in names)
    modules, problem = _modules(checkpoint, card) if card or not recipe else ({}, None)
    return {
        "kind": "checkpoint",
        "path": str(checkpoint.path),
        "revision": checkpoint.revision,
        "model_type": checkpoint.model_type,
        "recipe": recipe,
        "problem": problem,
        "modules": modules,
        "remote_code": list(checkpoint.remote_code),
        "quantised": checkpoint.quantised(names),
        "tensors": len(names),
        "tensors_by_prefix": dict(tops),
    }


def _modules(checkpoint: Checkpoint, card: RecipeCard | None) -> tuple[dict[str, Json], str | None]:
    if card is None:
        return {}, f"no recipe serves '{checkpoint.model_type}'; see recipes/README.md"
    try:
        return encode(find_recipe(card.name).module_names(checkpoint)), None
    except VlexportError as error:
        return {}, str(error)
