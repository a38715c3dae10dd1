"""Float16 calibration: the ranges of the numbers inside a tower, and the layers that must stay float32.

The tower runs in bfloat16, which has the range of float32: what is bfloat16 there would be float16 in the
engine, and what is float32 there (statistics of norms, angles) stays so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vlexport._build.export import cast_floats
from vlexport.checkpoint import Checkpoint
from vlexport.parity.inputs_exact import DispatchHook
from vlexport.parity.metrics import HALF_MAX
from vlexport.parity.samples import random_items
from vlexport.recipe import Recipe
from vlexport.specs import BYTES, PIXELS, MediaItem
from vlexport.vision.tower import WIDE, block_of, projections

RANGE_DTYPE = "bfloat16"
# Real inputs may reach further than the samples: two bits of headroom, as where reports begin to warn.
MOST = HALF_MAX / 4
# Larger calls have the same ranges.
MAX_PATCHES = 640
# Normalised pixels of all-black and all-white pictures are inside these; bytes are these.
FLAT = {PIXELS: (-2.5, 2.5), BYTES: (0, 255)}


def measure_fp32_layers(
    recipe: Recipe[Any], checkpoint: Checkpoint, form: str, input_dtype: str = PIXELS
) -> dict[str, str]:
    """Return the parts that must stay float32 in a float16 tower, found by running it on sample inputs."""
    tower = recipe.tower(checkpoint, RANGE_DTYPE, None, input_dtype)
    config = recipe.read_config(checkpoint, input_dtype)
    with torch.no_grad(), Ranges(tower) as ranges:
        for items in _calls(recipe, config):
            tower(cast_floats(recipe.prepare(config, items, form), RANGE_DTYPE))
    return fp32_layers_of(ranges.peaks)


def fp32_layers_of(peaks: Mapping[str, float]) -> dict[str, str]:
    """Return the projections that exceed the range, and the first block whose rows do."""
    beyond = [name for name, peak in peaks.items() if not peak <= MOST]
    blocks = [name for name in beyond if block_of(name) is not None and name.count(".") == 1]
    first = min(blocks, key=lambda name: block_of(name) or 0, default=None)
    return {name: WIDE for name in sorted(beyond) if name not in blocks or name == first}


def _calls(recipe: Recipe[Any], config: Any) -> Iterator[Sequence[MediaItem]]:
    mixes = sorted(recipe.shape_sets(config).values(), key=_patches)
    small = [mix for mix in mixes if _patches(mix) <= MAX_PATCHES] or mixes[:1]
    for number, mix in enumerate(small):
        yield random_items(recipe, config, mix, seed=number)
    for value in FLAT[recipe.input_dtype(config)]:
        items = random_items(recipe, config, small[0], seed=0)
        yield [replace(item, patches=torch.full_like(item.patches, value)) for item in items]


def _patches(mix: Sequence[tuple[str, tuple[int, int, int]]]) -> int:
    return sum(math.prod(grid) for _, grid in mix)


class Ranges(DispatchHook):
    """The largest magnitude of what would be half precision, by the part that made it or took it in."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.peaks: dict[str, float] = {}
        self._inside: list[str] = []
        self._looking = False
        for name in projections(tower):
            module = tower.get_submodule(name)
            largest = max(float(weight.abs().max()) for weight in module.parameters())
            # A weight has to fit as it is; it does not grow with the input.
            self.peaks[name] = largest if largest > HALF_MAX else 0.0
            self._watch(module, name)
        for name, module in tower.named_modules():
            if block_of(name) is not None and name.count(".") == 1:
                self._watch(module, name)

    def _watch(self, module: nn.Module, name: str) -> None:
        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            for argument in arguments:
                if isinstance(argument, Tensor):
                    self._see(name, argument)
            self._inside.append(name)

        def leave(_: nn.Module, __: tuple[Any, ...], result: Tensor) -> None:
            self._inside.pop()
            # What a projection gives is added to the rows of its block.
            self._see(self._inside[-1] if self._inside else name, result)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def saw(self, name: str, args: Sequence[Any], output: Tensor) -> None:
        # Fresh memory holds anything.
        if self._inside and not self._looking and "empty" not in name:
            self._see(self._inside[-1], output)

    def _see(self, name: str, tensor: Tensor) -> None:
        """Keep the largest magnitude; infinities are masks, since bfloat16 has none of its own below 3e38."""
        if tensor.dtype != torch.bfloat16 or not tensor.numel():
            return
        self._looking = True
        peak = float(torch.nan_to_num(tensor, 0.0, 0.0, 0.0).abs().max())
        self._looking = False
        self.peaks[name] = max(self.peaks.get(name, 0.0), peak)
