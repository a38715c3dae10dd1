"""L0 of the config of a sliced family: every field against facts gathered without the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from vlexport.checkpoint import Checkpoint
from vlexport.parity.slice_pixels import CutRule
from vlexport.parity.tables import Finding
from vlexport.vision.slice_facts import LAYERS, PARTS, SliceFacts, facts_of

NO_FACT = object()


def check_sizes(checkpoint: Checkpoint, config: object) -> list[Finding]:
    """Compare a config with the facts, field by field; a field without a fact is a fault too."""
    wrong = list(_differences("", config, config_facts(checkpoint)))
    return [Finding(table="sizes", wrong=len(wrong), first=wrong[0] if wrong else "")]


def _differences(name: str, given: Any, facts: Any) -> Iterator[str]:
    if is_dataclass(given):
        for field in fields(given):
            at = facts.get(field.name, NO_FACT) if isinstance(facts, Mapping) else NO_FACT
            at = getattr(facts, field.name, at)
            yield from _differences(f"{name}.{field.name}".strip("."), getattr(given, field.name), at)
    elif facts is NO_FACT:
        yield f"{name} is {given!r}, and nothing says what it should be: add a fact in vision/slice_facts.py"
    elif given != facts:
        yield f"{name} is {given!r}, not {facts!r}"


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


def raw_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the processor's settings from the files themselves, or those of config.json."""
    combined = _json(checkpoint, "processor_config.json").get("image_processor")
    alone = _json(checkpoint, "preprocessor_config.json")
    inside = checkpoint.config.get("slice_config")
    settings = [each for each in (combined, alone, inside) if isinstance(each, Mapping) and each]
    return settings[0] if settings else checkpoint.config


def _json(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    path = checkpoint.path / name
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found
