"""Bundles made of a few bytes, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vlexport.bundle import Bundle
from vlexport.bundle.files import FileRecord
from vlexport.bundle.manifest import (
    Bounds,
    BuildKey,
    CheckpointIdentity,
    GraphsIdentity,
    Manifest,
    Precision,
    Proof,
    ProofCall,
    RecipeIdentity,
    Verdict,
)
from vlexport.bundle.store import Staging, staged
from vlexport.specs import Range, ShapeProfile, Symbol, TensorSpec
from vlexport.target import Target

PATCHES = Symbol("patches")
TOKENS = Symbol("tokens")

PROFILE = ShapeProfile("image", {PATCHES: Range(4, 1024, 4096), TOKENS: Range(1, 256, 1024)})

TARGET = Target(backend="eager", version="0.1", platform="linux-x86_64", device="cpu", torch="2.13.0+cpu")

PAYLOADS = {"engine.bin": bytes(range(256)) * 8, "weights/tower.data": b"w" * 5000}

KEY = "a" * 64

MANIFEST = Manifest(
    key=KEY,
    recipe=RecipeIdentity(name="a_recipe", digest="b" * 64),
    checkpoint=CheckpointIdentity(source="org/name", revision="c" * 40, weights="d" * 64),
    preprocessing={"patch_size": 14, "mean": [0.48, 0.46, 0.41], "resample": None, "fast": True},
    position_rule="mrope",
    precision=Precision(dtype="bfloat16", fp32_layers={"norm": "float32"}, quantisation=None),
    attention_form="packed_rows",
    graphs=GraphsIdentity(selector="evs", target=replace(TARGET, backend="inductor")),
    profile=PROFILE,
    inputs=(TensorSpec("patches", "float32", (4 * TOKENS, 1176)), TensorSpec("order", "int32", (PATCHES,))),
    outputs=(TensorSpec("embeds", "float32", (TOKENS, 64)),),
    target=TARGET,
    versions={"torch": "2.13.0+cpu", "vlexport": "0.1"},
    options={"opt_level": 3},
    files={},
    parity=Verdict(status="passed", table={"rows": [{"output": "embeds", "relative_l2": 1.5e-6}]}),
    proof=Proof(
        calls=(
            ProofCall(
                name="one image",
                bounds={"embeds": Bounds(relative_l2=1e-6, worst_token=5e-6)},
                rows_sha256="e" * 64,
            ),
        ),
        machine="eager@0.1; a processor",
    ),
    created="2026-01-31T12:00:00Z",
)

BUILD = BuildKey(
    recipe="a_recipe",
    recipe_digest="1" * 64,
    package_digest="2" * 64,
    weights_digest="3" * 64,
    config_digest="4" * 64,
    preprocessing={"patch_size": 14},
    backend="eager",
    backend_version="0.1",
    torch_version="2.13.0",
    exporter_versions={"onnxscript": "0.5"},
    dtype="float32",
    fp32_layers={"norm": "float32"},
    quantisation=None,
    attention_form="packed_rows",
    graphs=GraphsIdentity(selector="evs", target=replace(TARGET, backend="inductor")),
    profile=PROFILE,
    options={"opt_level": 3},
    target=TARGET,
)


def write(staging: Staging, payloads: Mapping[str, bytes] = PAYLOADS) -> dict[str, FileRecord]:
    """Put payloads into a staging; returns their records."""
    for name, data in payloads.items():
        path = staging.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return staging.files()


def store(
    into: Path,
    data: Path,
    *,
    name: str = "entry",
    payloads: Mapping[str, bytes] = PAYLOADS,
    created: str = "",
) -> Bundle:
    """Build and publish one bundle of `payloads` as `into/name`, over whatever is there."""
    with staged(into, name, user_data=data) as staging:
        manifest = replace(MANIFEST, files=write(staging, payloads), created=created or MANIFEST.created)
        return staging.publish(manifest)
