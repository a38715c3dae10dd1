"""The slow reference of sliced towers is what others compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Idefics2VisionConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
from vlexport.recipes._minicpmv_reference import SliceReference

from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import find_recipe
from vlexport.vision.slices import Slice, image_of_rows

RECIPE = find_recipe("minicpmv")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("reference")
    tiny = {version: Tiny(version=version, with_decoder=False) for version in ("2.0", "2.6")}
    return {
        version: Checkpoint.open(write_tiny_minicpmv(folder / version, each))
        for version, each in tiny.items()
    }


@pytest.mark.parametrize("version", ["2.6", "2.0"])
def test_the_reference_sees_what_the_whole_class_sees(
    version: str, checkpoints: dict[str, Checkpoint]
) -> None:
    """transformers' class, its own places included, on one slice as a plain image."""
    reference = RECIPE.reference(checkpoints[version])
    assert isinstance(reference, SliceReference)
    sizes: Any = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_size": 140, "patch_size": 14,
    }  # fmt: skip
    other: nn.Module = Idefics2VisionTransformer(Idefics2VisionConfig(**sizes))
    if version == "2.0":
        other = SiglipVisionModel(SiglipVisionConfig(**sizes, hidden_act="gelu", vision_use_head=False))
    other.eval().load_state_dict(reference.encoder.state_dict())
    shapes = [(1, 1), (10, 10), (3, 7), (9, 4), (2, 16), (13, 12)] if version == "2.6" else [(10, 10)]
    for rows, columns in shapes:
        patches = torch.randn(rows * columns, 588, generator=torch.Generator().manual_seed(rows))
        with torch.inference_mode():
            seen = reference.see(patches, Slice(start=0, rows=rows, columns=columns, frame=-1))
            whole = other(image_of_rows(patches, rows, columns, 14)[None]).last_hidden_state[0]
        # The same layers over the same rows: 5e-7 seen.
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
    assert isinstance(reference, SliceReference)
    for name, value in reference.resampler.attn.state_dict().items():
        assert torch.equal(value, attention.state_dict()[name])
