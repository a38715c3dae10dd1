"""Small random checkpoints to judge on: two seeds, and one whose residual stream has spikes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vlexport.recipes.demo import kimi_vl, minicpmv, nemotron_vl, qwen2_5_vl, qwen2_vl, qwen3_vl
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.classes import write_checkpoint as write_class
from vlexport.errors import RequestError
from vlexport.recipe import list_recipes

VIDEOS = "video_preprocessor_config.json"
# Peaks of about 3,000 after the patch embedding: their squares are beyond float16.
SPIKE = 3000.0
SPIKED_ROWS = (3, 7)
# Classes of transformers that show bugs of the generic recipe, which has no demo.
CLASSES = {
    "features": "llava",
    "class windows": "qwen2_5_omni_thinker",
    "class levels": "qwen3_vl",
    "cubic": "glm4v",
    "strip": "mistral3",
    "pooled": "siglip2",
    "square pools": "gemma3",
    "shuffled": "internvl",
}


# By recipe; the first of MiniCPM-V's stores a layer more than it runs.
TRIALS: Mapping[str, Mapping[str, Any]] = {
    "kimi_vl": {"native": kimi_vl.Tiny(depth=2)},
    "minicpmv": {
        "slices": minicpmv.Tiny(drop_last=True),
        "slice times": minicpmv.Tiny(version="4.5", depth=2),
        "learned places": minicpmv.Tiny(version="2.0", depth=2),
        "places in a line": minicpmv.Tiny(version="2.5", depth=2),
    },
    "nemotron_vl": {
        "learned": nemotron_vl.Tiny(depth=2),
        "final norm": nemotron_vl.Tiny(depth=1, final_norm=True, scaled=True),
        "tiles": nemotron_vl.Tiny(depth=2, temporal=1, tile=64),
    },
    "qwen2_5_vl": {"windows": qwen2_5_vl.Tiny(depth=2), "deep": qwen2_5_vl.Tiny(depth=12)},
    "qwen2_vl": {"frames": qwen2_vl.Tiny(depth=2)},
    "qwen3_vl": {"levels": qwen3_vl.Tiny(depth=3)},
}


def recipe_of(trial: str) -> str:
    found = _recipes_of_trials()
    if trial not in found:
        raise RequestError(f"no recipe has the trial '{trial}'. Known: {', '.join(sorted(found))}.")
    return found[trial]


@cache
def _recipes_of_trials() -> Mapping[str, str]:
    found = {name: card.name for card in list_recipes() for name in demo_trials(card.name)}
    return found | dict.fromkeys(CLASSES, "generic")


def demo_trials(recipe: str) -> Mapping[str, Any]:
    """Sizes of tiny checkpoints by name; a recipe may have none."""
    return TRIALS.get(recipe, {})


def write_trial(trial: str, folder: Path) -> None:
    """Write the checkpoints `plain`, `other` and `spiky`.

    Video frames may have other bounds than images, so that a mix-up shows.
    """
    if trial in CLASSES:
        for name in ("plain", "other", "spiky"):
            write_class(CLASSES[trial], folder / name)
        return
    recipe = recipe_of(trial)
    demo = importlib.import_module(f"vlexport.recipes.demo.{recipe}")
    contents = demo.contents(TRIALS[recipe][trial])
    paths = {
        name: write_checkpoint(folder / name, contents, seed=seed)
        for name, seed in (("plain", 0), ("other", 1), ("spiky", 2))
    }
    for path in paths.values():
        if (path / VIDEOS).exists():
            _narrow_videos(path, other=path == paths["other"])
    _add_spikes(paths["spiky"])


def _narrow_videos(path: Path, *, other: bool) -> None:
    file = path / VIDEOS
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["size"] = {"shortest_edge": 4 * 28 * 28, "longest_edge": (11 if other else 12) * 28 * 28}
    file.write_text(json.dumps(settings), encoding="utf-8")


def _add_spikes(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(
        name
        for name in tensors
        if ("patch_embed" in name and tensors[name].ndim > 3) or name.endswith("generator.embedder.weight")
    )
    for sign, row in zip((1.0, -1.0), SPIKED_ROWS, strict=True):
        tensors[name][row] *= sign * SPIKE
    save_file(tensors, file, metadata={"format": "pt"})
