"""Contents of a random Qwen2-VL checkpoint: the decoder and the files of Qwen2.5-VL, a tower of its own."""

from __future__ import annotations

from dataclasses import replace

from vlexport.recipes.demo import parts, qwen2_5_vl
from vlexport.recipes.demo.parts import Json, Text, Tree
from vlexport.recipes.demo.qwen2_5_vl import PIXELS, Tiny
from vlexport.recipes.demo.writing import CheckpointContents

__all__ = ["DEFAULT", "PIXELS", "Text", "Tiny", "contents"]

# The inner width of a tower is a multiple of its width.
DEFAULT = Tiny()


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    theirs = qwen2_5_vl.contents(tiny)
    config = {
        **theirs.config,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "text_config": {**theirs.config["text_config"], "model_type": "qwen2_vl_text"},
        "vision_config": vision_json(tiny),
    }
    tensors = qwen2_5_vl.tensors_of(tiny, tower(tiny), parts.decoder_layer(tiny.text, biases=True))
    return replace(theirs, config=config, tensors=tensors)


def vision_json(tiny: Tiny) -> Json:
    return {
        "model_type": "qwen2_vl_vision", "depth": tiny.depth, "num_heads": tiny.heads,
        "embed_dim": tiny.hidden, "hidden_size": tiny.out, "mlp_ratio": tiny.inner // tiny.hidden,
        "hidden_act": "quick_gelu", "in_channels": 3,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
    }  # fmt: skip


def tower(tiny: Tiny) -> Tree:
    blocks = [parts.block(tiny.hidden, tiny.inner, gain=tiny.branch_gain)] * tiny.depth
    return {**qwen2_5_vl.tower(tiny), "merger.ln_q.bias": parts.bias(tiny.hidden), "blocks": blocks}
