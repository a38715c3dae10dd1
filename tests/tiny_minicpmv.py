"""Tiny random MiniCPM-V checkpoints of every release on disk, for tests; what they hold is the demo's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vlexport.recipes.demo.minicpmv import Tiny, contents

from vlexport.checkpoint.writing import write_checkpoint

__all__ = ["VERSIONS", "Tiny", "write_tiny_minicpmv"]

VERSIONS = ("2.0", "2.5", "2.6", "4.0", "4.5")


def write_tiny_minicpmv(
    folder: str | Path, tiny: Tiny, *, seed: int = 0, config: Mapping[str, object] | None = None
) -> Path:
    """Write it; `config` replaces entries of config.json, None as a value leaves them out."""
    wanted = contents(tiny)
    changed = {**wanted.config, **(config or {})}
    kept = {name: value for name, value in changed.items() if value is not None}
    return write_checkpoint(folder, replace(wanted, config=kept), seed=seed)
