"""Bundles: finished builds on disk, the manifest in each, who trusts them, and the folder that holds them."""

from vlexport.bundle.bundle import Bundle, Inspection, command
from vlexport.bundle.files import MANIFEST_NAME
from vlexport.bundle.manifest import Manifest, Verdict
from vlexport.bundle.trust import Trust

__all__ = ["MANIFEST_NAME", "Bundle", "Inspection", "Manifest", "Trust", "Verdict", "command"]
