"""Settings of sliced checkpoints wherever they are stored, and every field of the config as facts have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlexport.recipes._minicpmv_reference import LAYERS, PARTS, SliceFacts, facts_of

from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.parity.pixels import raw_settings
from vlexport.recipe import find_recipe

# Both files that MiniCPM-V's processors write, and what 2.0 keeps in config.json; none at its default.
SLICED: dict[str, Any] = {
    "slice_mode": True,
    "max_slice_nums": 5,
    "scale_resolution": 84,
    "norm_mean": [0.1, 0.2, 0.3],
    "norm_std": [0.4, 0.3, 0.2],
    "use_image_id": False,
}
SLICED_CASES = {
    "own names": SLICED,
    "never cut": {**SLICED, "slice_mode": False},
    "numbered": {**SLICED, "use_image_id": True},
    "names of transformers": {
        **{name: value for name, value in SLICED.items() if "norm" not in name},
        "image_mean": SLICED["norm_mean"],
        "image_std": SLICED["norm_std"],
    },
    "nothing given": {},
}


def sliced_checkpoint(
    folder: Path, version: str, place: str, settings: Mapping[str, Any]
) -> tuple[Checkpoint, Any, Any]:
    """Write settings to one of the places where releases keep them; return checkpoint, recipe and config."""
    inside: dict[str, Any] = {"slice_config": settings if place == "slice_config" else None}
    inside |= dict(settings) if place == "config.json" else dict.fromkeys(SLICED)
    tiny = Tiny(version=version, depth=1, drop_last=False, with_decoder=False)
    path = write_tiny_minicpmv(folder / "checkpoint", tiny, config=inside)
    (path / "preprocessor_config.json").unlink(missing_ok=True)
    if place.startswith("pre"):
        (path / place).write_text(json.dumps(settings))
    elif place.startswith("proc"):
        (path / place).write_text(json.dumps({"image_processor": settings}))
    recipe, checkpoint = find_recipe("minicpmv"), Checkpoint.open(path)
    return checkpoint, recipe, recipe.read_config(checkpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRule:
    """How images are cut and normalised; `side` is that of a square slice in pixels."""

    patch: int
    side: int
    max_cells: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_dtype: str = "float32"


def config_facts(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return what each field of the recipe's config has to be."""
    facts: SliceFacts = facts_of(checkpoint)
    stored = [name for name in checkpoint.shapes(PARTS) if name.endswith(LAYERS)]
    return {
        "version": facts.release.version,
        "depth": len(stored),
        "tower": facts,
        "cut": cut_facts(checkpoint, facts),
        "numbered": facts.release.image_ids and raw_settings(checkpoint).get("use_image_id") is not False,
    }


def cut_facts(checkpoint: Checkpoint, facts: SliceFacts) -> CutRule:
    """Return how images are cut and normalised, as image_processing_minicpmv.py reads its settings."""
    settings = raw_settings(checkpoint)
    mean, std = (
        tuple(map(float, settings.get(f"norm_{name}") or settings.get(f"image_{name}") or [0.5] * 3))
        for name in ("mean", "std")
    )
    return CutRule(
        patch=facts.patch,
        side=settings.get("scale_resolution") or 448,
        max_cells=1 if settings.get("slice_mode") is False else settings.get("max_slice_nums") or 9,
        mean=mean,
        std=std,
    )


def assert_facts(given: Any, facts: Any, name: str = "config") -> None:
    """Assert that every field has the value that the facts have under its name, and that they have one."""
    if not hasattr(given, "__dataclass_fields__"):
        assert given == facts, name
        return
    for field in given.__dataclass_fields__:
        fact = facts[field] if isinstance(facts, Mapping) else getattr(facts, field)
        assert_facts(getattr(given, field), fact, f"{name}.{field}")
