"""Bundles: finished builds on disk, the manifest in each, who trusts them, and the folder that holds them."""

from vlexport.bundle.bundle import Bundle, Depth, Inspection, command
from vlexport.bundle.files import MANIFEST_NAME, NETWORK_NAME, FileRecord
from vlexport.bundle.manifest import (
    SCHEMA,
    AdapterIdentity,
    Bounds,
    BuildKey,
    CheckpointIdentity,
    GraphsIdentity,
    Manifest,
    Precision,
    Proof,
    ProofCall,
    RecipeIdentity,
    Status,
    Verdict,
    key_of,
)
from vlexport.bundle.store import Staging, check_tag, entry_for, finished, remove_leftovers, staged, tag
from vlexport.bundle.trust import Trust
from vlexport.codec import Json, JsonObject

__all__ = [
    "MANIFEST_NAME",
    "NETWORK_NAME",
    "SCHEMA",
    "AdapterIdentity",
    "Bounds",
    "BuildKey",
    "Bundle",
    "CheckpointIdentity",
    "Depth",
    "FileRecord",
    "GraphsIdentity",
    "Inspection",
    "Json",
    "JsonObject",
    "Manifest",
    "Precision",
    "Proof",
    "ProofCall",
    "RecipeIdentity",
    "Staging",
    "Status",
    "Trust",
    "Verdict",
    "check_tag",
    "command",
    "entry_for",
    "finished",
    "key_of",
    "remove_leftovers",
    "staged",
    "tag",
]
