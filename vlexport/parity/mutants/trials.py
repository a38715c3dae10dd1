"""Small random checkpoints to judge on: two seeds, and one whose residual stream has spikes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from vlexport.checkpoint.writing import write_checkpoint
from vlexport.errors import RequestError
from vlexport.parity.mutants.judge import Trial
from vlexport.recipe import list_recipes

DEPTH = 2
# Peaks of about 3,000 after the patch embedding: their squares are beyond float16.
SPIKE = 3000.0
SPIKED_ROWS = (3, 7)


def judged_recipe(name: str | None = None) -> str:
    """The recipe whose line is patched: the named one, or the first with windows, pruning and a demo."""
    known = [card.name for card in list_recipes() if _demo(card.name) is not None]
    fitting = [each for each in known if hasattr(_demo(each), "Tiny")]
    if name is not None and name not in fitting:
        raise RequestError(
            f"recipe '{name}' has no tiny checkpoint to judge on. Known: {', '.join(fitting)}."
        )
    return name or fitting[-1]


def _demo(name: str) -> Any:
    try:
        return importlib.import_module(f"vlexport.recipes.demo.{name}")
    except ModuleNotFoundError:
        return None


def write_trial(recipe: str, folder: Path) -> Trial:
    """Write the checkpoints; video frames have other bounds than images, so that a mix-up shows."""
    demo = _demo(recipe)
    paths = {
        name: write_checkpoint(folder / name, demo.contents(demo.Tiny(depth=DEPTH)), seed=seed)
        for name, seed in (("plain", 0), ("other", 1), ("spiky", 2))
    }
    for path in paths.values():
        _narrow_videos(path, other=path == paths["other"])
    _add_spikes(paths["spiky"])
    return Trial(recipe=recipe, **paths)


def _narrow_videos(path: Path, *, other: bool) -> None:
    file = path / "video_preprocessor_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["size"] = {"shortest_edge": 4 * 28 * 28, "longest_edge": (11 if other else 12) * 28 * 28}
    file.write_text(json.dumps(settings), encoding="utf-8")


def _add_spikes(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "patch_embed" in name and tensors[name].ndim > 1)
    for sign, row in zip((1.0, -1.0), SPIKED_ROWS, strict=True):
        tensors[name][row] *= sign * SPIKE
    save_file(tensors, file, metadata={"format": "pt"})
