"""Tiny random MiniCPM-V checkpoints of every release on disk, for tests; what they hold is the demo's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlexport.recipes.demo.minicpmv import Tiny, contents
from vlexport.recipes.demo.parts import named, weight
from vlexport.recipes.demo.writing import write_checkpoint

__all__ = ["VERSIONS", "Tiny", "other_parts", "write_tiny_minicpmv"]

VERSIONS = ("2.0", "2.5", "2.6", "4.0", "4.5")
OTHERS = ("vpm.head.probe", "apm.conv1.weight", "audio_projection_layer.linear1.weight", "tts.emb.weight")


def other_parts(contents: Any) -> Any:
    """Add what a tower must not read: its head, audio and speech."""
    others = named({name: weight(4, 4) for name in OTHERS})
    return replace(contents, tensors={**contents.tensors, **others})


def write_tiny_minicpmv(
    folder: str | Path,
    tiny: Tiny,
    *,
    seed: int = 0,
    config: Mapping[str, object] | None = None,
    others: bool = False,
) -> Path:
    """Write it, with other parts or not; `config` replaces entries of config.json, None leaves them out."""
    made = other_parts(contents(tiny)) if others else contents(tiny)
    changed = {**made.config, **(config or {})}
    kept = {name: value for name, value in changed.items() if value is not None}
    path: Path = write_checkpoint(folder, replace(made, config=kept), seed=seed)
    return path
