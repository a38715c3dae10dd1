"""Contents of a random Qwen2-VL checkpoint: the decoder and the files of Qwen2.5-VL, a tower of its own."""

from __future__ import annotations

from dataclasses import replace

from vlexport.recipes.demo import Tensors, linear, qwen2_5_vl
from vlexport.recipes.demo.qwen2_5_vl import Text, Tiny

from vlexport.checkpoint import CheckpointContents, random_bias

__all__ = ["DEFAULT", "TRIALS", "Text", "Tiny", "contents"]

# The inner width of a tower is a multiple of its width.
DEFAULT = Tiny()
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 16, 20), (-1.7777, 0.9088, -0.4014, 0.1931, 0.7808, 1.2044, -1.5879))
# Planted bugs are judged on it.
TRIALS = {"frames": Tiny(depth=2)}


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    """Return what the demo writes, or a test with other sizes."""
    theirs: CheckpointContents = qwen2_5_vl.contents(tiny)
    old, new = qwen2_5_vl.tower_tensors(tiny), tower_tensors(tiny)
    others = {
        name: kept for name, kept in theirs.tensors.items() if name.removeprefix(tiny.naming) not in old
    }
    tower = {tiny.naming + name: replace(tensor, stream=name) for name, tensor in new.items()}
    return replace(theirs, config=config_json(tiny), tensors={**tower, **others})


def config_json(tiny: Tiny) -> dict[str, object]:
    found = {
        **qwen2_5_vl.config_json(tiny),
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": vision_json(tiny),
    }
    text = found.get("text_config")
    return (
        {**found, "text_config": {**text, "model_type": "qwen2_vl_text"}} if isinstance(text, dict) else found
    )


def vision_json(tiny: Tiny) -> dict[str, object]:
    found: dict[str, object] = {
        "depth": tiny.depth,
        "embed_dim": tiny.hidden,
        "hidden_act": "quick_gelu",
        "hidden_size": tiny.out,
        "mlp_ratio": tiny.inner // tiny.hidden,
        "num_heads": tiny.heads,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if tiny.config_style == "flat":
        return {**found, "in_chans": 3, "spatial_patch_size": 14}
    rope = {"rope_theta": 10000.0, "rope_type": "axial"}
    return {**found, "in_channels": 3, "model_type": "qwen2_vl_vision", "rope_parameters": rope}


def tower_tensors(tiny: Tiny) -> Tensors:
    """Return vision tower and merger, names without prefix: norms with bias, an MLP of two layers."""
    hidden, inner = tiny.hidden, tiny.inner
    kept = {
        name: tensor
        for name, tensor in qwen2_5_vl.tower_tensors(tiny).items()
        if "_proj." not in name or ".mlp." not in name
    }
    mlp = {**linear("fc1", inner, hidden), **linear("fc2", hidden, inner, gain=tiny.branch_gain)}
    for index in range(tiny.depth):
        kept |= {f"blocks.{index}.mlp.{name}": tensor for name, tensor in mlp.items()}
    norms = ("merger.ln_q", *(f"blocks.{index}.norm{n}" for index in range(tiny.depth) for n in (1, 2)))
    return {**kept, **{f"{name}.bias": random_bias(hidden) for name in norms}}
