"""Planted faults of sliced towers must show; and the slow reference must be what others compute."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Idefics2VisionConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
from vlexport.recipes.minicpmv import Tower

from tests.slice_mixes import random_mix, relative_l2, worst_token
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import find_recipe
from vlexport.vision.one_by_one import OneByOne
from vlexport.vision.slices import Slice, image_of_rows

RECIPE = find_recipe("minicpmv")
# The gate's own limits, parity.md 5 for float32.
RELATIVE_L2, WORST_TOKEN = 1e-5, 5e-5
Inputs = dict[str, Tensor]


@dataclass
class Fault:
    """A change of tower or inputs, and the release and the strength of pixels that show it."""

    version: str = "2.6"
    tower: Callable[[Tower], object] = lambda _: None
    inputs: Callable[[Inputs], Mapping[str, Tensor]] = lambda _: {}
    strength: float = 1.0


def norms(tower: nn.Module, eps: float) -> None:
    for module in tower.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps


def gelu(tower: Tower, form: str) -> None:
    for block in tower.blocks:
        block.mlp.form = form


def zero(weight: Tensor) -> None:
    with torch.no_grad():
        weight.zero_()


def swap_rows(weight: Tensor, parts: int, first: int, second: int) -> None:
    with torch.no_grad():
        split = list(weight.chunk(parts))
        split[first], split[second] = split[second].clone(), split[first].clone()
        weight.copy_(torch.cat(split))


def sizes(tower: Tower, **changed: Any) -> None:
    tower.sizes = replace(tower.sizes, **changed)


def narrower(runs: Tensor) -> Tensor:
    """Two segments of half the length instead of one, where that is a whole number."""
    even = runs[:, 1] % 2 == 0
    return torch.stack(
        [torch.where(even, 2 * runs[:, 0], runs[:, 0]), runs[:, 1] // (1 + even.int())], -1
    ).int()


FAULTS = {
    "epsilon of all norms": Fault(tower=lambda tower: norms(tower, 1e-5), strength=1e-2),
    "exact GELU": Fault(tower=lambda tower: gelu(tower, "none")),
    "tanh GELU in the oldest": Fault("2.0", tower=lambda tower: gelu(tower, "tanh")),
    "a layer too few": Fault(tower=lambda tower: tower.blocks.pop(-1)),
    "no bias of the patch kernel": Fault(tower=lambda tower: zero(tower.embed.bias)),
    "no last norm": Fault(tower=lambda tower: setattr(tower, "norm", nn.Identity())),
    "keys and values swapped": Fault(
        tower=lambda tower: swap_rows(tower.resampler.attn.in_proj_weight, 3, 1, 2)
    ),
    "queries and keys of a fused projection swapped": Fault(
        "2.0", tower=lambda tower: swap_rows(tower.state_dict()["blocks.0.attn.qkv.weight"], 3, 0, 1)
    ),
    "last matrix transposed": Fault(
        tower=lambda tower: setattr(tower.resampler, "proj", nn.Parameter(tower.resampler.proj.T))
    ),
    "no norm of queries": Fault(tower=lambda tower: setattr(tower.resampler, "ln_q", nn.Identity())),
    "no places of queries": Fault("2.0", tower=lambda tower: zero(tower.state_dict()["resampler.pos_embed"])),
    "no frame numbers in keys": Fault("4.5", tower=lambda tower: sizes(tower, frame_times=False)),
    "frame numbers off by one": Fault("4.5", inputs=lambda given: {"frames": given["frames"] + 1}),
    "no frame counted as the first": Fault(
        "4.5", inputs=lambda given: {"frames": given["frames"].clamp(min=0)}
    ),
    "key rows and columns swapped": Fault(inputs=lambda given: {"cells": given["cells"].flip(-1)}),
    "keys without places": Fault(inputs=lambda given: {"cells": torch.zeros_like(given["cells"])}),
    "key places off by one": Fault(inputs=lambda given: {"cells": given["cells"] + 1}),
    "positions of neighbours": Fault(inputs=lambda given: {"position_ids": given["position_ids"].roll(1)}),
    "table weights swapped": Fault(
        "2.0",
        inputs=lambda given: {"row_weights": given["column_weights"], "column_weights": given["row_weights"]},
    ),
    "answers in the order of the blocks": Fault(
        inputs=lambda given: {"group_inverse": torch.arange(len(given["group_inverse"])).int()}
    ),
    "rows in another order": Fault(inputs=lambda given: {"order": given["order"].flip(0)}),
    "segments cut in halves": Fault(inputs=lambda given: {"slice_runs": narrower(given["slice_runs"])}),
    "one row of the oldest release's line": Fault(
        "2.5", inputs=lambda given: {"position_ids": given["position_ids"].clamp(min=1)}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("faults")
    tiny = {version: Tiny(version=version, with_decoder=False) for version in ("2.0", "2.5", "2.6", "4.5")}
    return {
        version: Checkpoint.open(write_tiny_minicpmv(folder / version, each))
        for version, each in tiny.items()
    }


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_far_beyond_the_limits(name: str, checkpoints: dict[str, Checkpoint]) -> None:
    fault = FAULTS[name]
    checkpoint = checkpoints[fault.version]
    config = RECIPE.read_config(checkpoint)
    items = random_mix(random.Random(3), config.cut, timed=config.variant.frame_times)
    items = [replace(item, patches=item.patches * fault.strength) for item in items]
    tower = RECIPE.tower(checkpoint, "float32")
    assert isinstance(tower, Tower)
    inputs = RECIPE.prepare(config, items, "grouped")
    with torch.inference_mode():
        right = tower(inputs)["embeds"]
    fault.tower(tower)
    with torch.inference_mode():
        wrong = tower({**inputs, **fault.inputs(inputs)})["embeds"]
    assert relative_l2(wrong, right) > 5 * RELATIVE_L2
    assert worst_token(wrong, right) > WORST_TOKEN


def see(reference: OneByOne, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A random slice as a plain image, and what the reference's tower makes of it."""
    patches = torch.randn(rows * columns, 588, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        seen = reference.see(patches, Slice(start=0, rows=rows, columns=columns, frame=-1))
    return image_of_rows(patches, rows, columns, 14)[None], seen


@pytest.mark.parametrize("size", [(1, 1), (10, 10), (3, 7), (9, 4), (2, 16), (13, 12)])
def test_the_reference_sees_what_the_whole_class_sees(
    size: tuple[int, int], checkpoints: dict[str, Checkpoint]
) -> None:
    reference = RECIPE.reference(checkpoints["2.6"])
    assert isinstance(reference, OneByOne)
    settings = Idefics2VisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        image_size=140, patch_size=14,
    )  # fmt: skip
    other = Idefics2VisionTransformer(settings).eval()
    other.load_state_dict(reference.encoder.state_dict())
    image, seen = see(reference, *size)
    with torch.inference_mode():
        whole = other(image).last_hidden_state[0]
    # The same layers over the same rows: 5e-7 seen.
    torch.testing.assert_close(seen, whole, rtol=0, atol=5e-6)


def test_the_oldest_reference_sees_what_the_whole_class_sees(checkpoints: dict[str, Checkpoint]) -> None:
    reference = RECIPE.reference(checkpoints["2.0"])
    assert isinstance(reference, OneByOne)
    settings = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        image_size=140, patch_size=14, hidden_act="gelu", vision_use_head=False,
    )  # fmt: skip
    other = SiglipVisionModel(settings).eval()
    other.load_state_dict(reference.encoder.state_dict())
    image, seen = see(reference, 10, 10)
    with torch.inference_mode():
        whole = other(image).last_hidden_state[0]
    torch.testing.assert_close(seen, whole, rtol=0, atol=5e-6)


def test_the_reference_agrees_with_a_file_of_weights_alone(
    checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    """No module of ours in between: torch's attention filled straight from the stored names."""
    checkpoint = checkpoints["2.6"]
    stored = checkpoint.read(
        [name for name in checkpoint.tensor_names() if name.startswith("resampler.attn.")]
    )
    attention = nn.MultiheadAttention(256, 2)
    attention.load_state_dict({name.removeprefix("resampler.attn."): value for name, value in stored.items()})
    reference = RECIPE.reference(checkpoint)
    assert isinstance(reference, OneByOne)
    for name, value in reference.resampler.attn.state_dict().items():
        assert torch.equal(value, attention.state_dict()[name])
