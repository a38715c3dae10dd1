"""L0 of a stored bundle: it is what its manifest says, made from the weights that it is compared with."""

from __future__ import annotations

import hashlib

from vlexport.bundle import Bundle, Manifest
from vlexport.codec import Json, canonical, encode
from vlexport.parity.report import Row
from vlexport.parity.subject import Subject


def subject_of(manifest: Manifest) -> str:
    """What a report belongs to: the build and the bytes of its payloads, whatever the verdict."""
    files: dict[str, Json] = {name: record.sha256 for name, record in manifest.files.items()}
    return hashlib.sha256(canonical({"key": manifest.key, "files": files})).hexdigest()


def identity_rows(bundle: Bundle, subject: Subject, *, chosen: bool) -> list[Row]:
    """Weights and settings of the checkpoint against the manifest; with a chosen one they may differ."""
    manifest = bundle.manifest
    names = subject.recipe.weight_names(subject.checkpoint, subject.config)
    same_weights = subject.checkpoint.digest(names) == manifest.checkpoint.weights
    settings = encode(subject.recipe.read_config(subject.checkpoint))
    same_settings = canonical(settings) == canonical(manifest.preprocessing)
    return [
        _row("weights", same_weights, chosen=chosen),
        _row("settings", same_settings, chosen=chosen),
    ]


def _row(check: str, same: bool, *, chosen: bool) -> Row:
    differs = not same
    return Row(
        level="L0",
        check=check,
        shapes="-",
        metrics={"wrong": float(differs)},
        limits={} if chosen and differs else {"wrong": 0.0},
        origin="the manifest names what the engine was built from",
        note="the checkpoint is not the one that the bundle was built from" if differs else "",
        given="observed" if chosen and differs else None,
    )
