"""A tiny random Qwen2.5-VL checkpoint on disk, for tests; what it holds is the demo's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vlexport.recipes.demo.parts import named
from vlexport.recipes.demo.qwen2_5_vl import CHAT_TEMPLATE, SPECIAL_TOKENS, Tiny, contents, token, tower
from vlexport.recipes.demo.writing import write_checkpoint

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL_TOKENS",
    "Tiny",
    "flat",
    "token",
    "tower_tensors",
    "write_tiny_qwen2_5_vl",
]


def tower_tensors(tiny: Tiny) -> dict[str, Any]:
    return dict(named(tower(tiny)))


def flat(contents: Any) -> Any:
    """The same contents, with the config of older releases: the decoder's settings at top level."""
    config = dict(contents.config)
    text, vision = dict(config.pop("text_config")), dict(config.pop("vision_config"))
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["torch_dtype"] = config.pop("dtype")
    for name in ("model_type", "in_channels", "rope_parameters"):
        del vision[name]
    vision |= {"in_chans": 3, "spatial_patch_size": 14}
    return replace(contents, config={**text, **config, "vision_config": vision})


def write_tiny_qwen2_5_vl(
    folder: str | Path, *, seed: int = 0, shards: int = 1, config_style: str = "nested", **sizes: Any
) -> Path:
    """Write it; `config_style` is `flat` (older) or `nested`; the inner width is twice the tower's."""
    sizes.setdefault("inner", 2 * sizes.get("hidden", 64))
    made = contents(Tiny(**sizes))
    path: Path = write_checkpoint(
        folder, flat(made) if config_style == "flat" else made, seed=seed, shards=shards
    )
    return path
