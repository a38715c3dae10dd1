"""Bytes as pixels: every level of every channel, inside towers and on the host, bit for bit."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.golden_data import FOLDER
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.parity.pixels import OfBytes
from vlexport.recipe import Recipe, find_recipe
from vlexport.specs import MediaItem, Pixels

E2E = FOLDER / "e2e" / "checkpoint"
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"do_rescale": False},
    {"do_normalize": False},
    {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.3, 0.2], "rescale_factor": 1 / 127},
)


def all_levels(side: int) -> Pixels:
    """An image in which each channel has every level somewhere, in another order."""
    places = torch.arange(side * side)
    channels = [places % 256, (places * 7 + 3) % 256, (places * 31 + 90) % 256]
    return Pixels(kind="image", frames=torch.stack(channels, -1).to(torch.uint8).reshape(1, side, side, 3))


def assert_same_pixels(recipe: Recipe, checkpoint: Checkpoint, side: int) -> None:
    known, config = recipe.read_config(checkpoint), recipe.read_config(checkpoint, "uint8")
    image = all_levels(side)
    pixels, item = recipe.preprocess(known, image), recipe.preprocess(config, image)
    levels = recipe.packing(config).levels
    assert levels is not None
    assert (item.patches.dtype, item.grid) == (torch.uint8, pixels.grid)
    for channel in item.patches.chunk(3, dim=1):
        assert len(channel.unique()) == 256
    assert torch.equal(levels.pixels(item.patches), pixels.patches)
    assert_same_reference(checkpoint, item, pixels.patches)
    assert torch.equal(levels.bytes_of(pixels.patches), item.patches)


def assert_same_reference(checkpoint: Checkpoint, item: MediaItem, pixels: torch.Tensor) -> None:
    """What the gate makes of the files by itself is within rounding of what the recipe read from them."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given: Any = SimpleNamespace(
            module=nn.Linear(1, 1, dtype=dtype), run=lambda items: {"embeds": items[0].patches}
        )
        found = OfBytes(given, checkpoint).run([item])["embeds"]
        assert found.dtype == dtype
        step = 2 * torch.finfo(dtype).eps + 1e-6
        assert torch.allclose(found.float(), pixels, rtol=step, atol=step)


def test_towers_of_grids_see_what_the_host_would_have_given(tmp_path, subtests):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(E2E / name, tmp_path)
    settings = json.loads((E2E / "preprocessor_config.json").read_text())
    for change in CHANGES:
        with subtests.test(str(change)):
            text = json.dumps({**settings, **change})
            (tmp_path / "preprocessor_config.json").write_text(text)
            assert_same_pixels(find_recipe("qwen2_5_vl"), Checkpoint.open(tmp_path), 112)


def test_towers_of_slices_see_what_the_host_would_have_given(tmp_path, subtests):
    tiny = Tiny(version="4.5", depth=1, drop_last=False, with_decoder=False)
    path = write_tiny_minicpmv(tmp_path / "tiny", tiny)
    for settings in ({"norm_mean": [0.1, 0.2, 0.3], "norm_std": [0.4, 0.3, 0.2]}, {}):
        with subtests.test(str(settings)):
            (path / "preprocessor_config.json").write_text(json.dumps({**settings, "scale_resolution": 112}))
            assert_same_pixels(find_recipe("minicpmv"), Checkpoint.open(path), 112)
