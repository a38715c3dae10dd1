"""Calls larger than any that a build compares: many segments, long ones, far places; against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vlexport.recipes.demo import kimi_vl, minicpmv, qwen2_5_vl, qwen2_vl
from vlexport.recipes.demo.writing import write_checkpoint

from vlexport.checkpoint import Checkpoint
from vlexport.parity.samples import random_items
from vlexport.recipe import recipe_for
from vlexport.vision.attention.layout import LAYOUTS

# Two implementations in float32, one block; measured 5.3e-6 at most.
LIMIT = 2e-5
GRID = qwen2_5_vl.Tiny(depth=1, hidden=16, heads=1, inner=16, with_decoder=False)
# The side of the released table, where borders of buckets are rounded as they are there.
SLICES = minicpmv.Tiny(depth=1, side=70, with_decoder=False)
# The sides of the released table of positions.
NATIVE = kimi_vl.Tiny(depth=1, hidden=16, heads=1, inner=16, table=(64, 64), with_decoder=False)
TOWERS: dict[str, Any] = {
    "windows": qwen2_5_vl.contents(GRID),
    "frames": qwen2_vl.contents(GRID),
    "slices": minicpmv.contents(SLICES),
    "line": minicpmv.contents(replace(SLICES, version="2.5")),
    "times": minicpmv.contents(replace(SLICES, version="4.5")),
    "native": kimi_vl.contents(NATIVE),
}
GRID_CALLS = {
    "many frames": [("video", (300, 2, 2)), ("image", (1, 4, 6)), ("video", (300, 2, 2))],
    "one long frame": [("image", (1, 2, 2100))],
    "one tall frame": [("image", (1, 2100, 2))],
}
SLICE_CALLS = {
    "many slices": [("image", (1, 1, 2))] * 300 + [("image", (1, 2, 1))] * 20,
    # Waves at far places are float32 on both sides, and differ by more beyond 2,000.
    "one long slice": [("image", (1, 1, 1500))],
    "one large slice": [("image", (1, 64, 66))],
    "one tall slice": [("image", (1, 2100, 2))],
    "sides that meet borders": [("image", (1, 35, 14)), ("image", (1, 10, 63)), ("image", (1, 42, 30))],
}
NATIVE_CALLS = {
    "many images": [("image", (1, 2, 2))] * 300 + [("image", (1, 4, 6))] * 20,
    "one long image": [("image", (1, 2, 510))],
    "one tall image": [("image", (1, 510, 2))],
    "the table as it is": [("image", (1, 64, 64))],
}
CALLS_OF = {"windows": GRID_CALLS, "frames": GRID_CALLS, "native": NATIVE_CALLS}
CALLS = [(tower, call) for tower in TOWERS for call in CALLS_OF.get(tower, SLICE_CALLS)]


@pytest.mark.seconds
@pytest.mark.parametrize(("tower", "call"), CALLS)
def test_large_calls_equal_the_reference_in_every_layout(tower: str, call: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "checkpoint", TOWERS[tower], seed=0))
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    items = random_items(recipe, config, (GRID_CALLS | SLICE_CALLS | NATIVE_CALLS)[call], seed=0)
    if tower == "times":
        # Tenths of a second, up to two hours.
        items = tuple(
            replace(item, frame_groups=((min(72000, 7 * number**2),),))
            for number, item in enumerate(items, 1)
        )
    wanted = recipe.reference(checkpoint).run(items)["embeds"]
    module = recipe.tower(checkpoint, "float32")
    for layout in LAYOUTS:
        with torch.inference_mode():
            found = module(recipe.prepare(config, items, layout))["embeds"]
        error = float((found - wanted).norm(dim=-1).max() / wanted.norm(dim=-1).mean())
        assert error < LIMIT, (layout, error)
