"""Contents of a random Qwen3-VL checkpoint: tower, dense or MoE decoder; files as those of Qwen2.5-VL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlexport.recipes.demo import parts, qwen2_5_vl
from vlexport.recipes.demo.parts import Json, Text, Tree
from vlexport.recipes.demo.writing import CheckpointContents

__all__ = ["DEFAULT", "PIXELS", "Text", "Tiny", "contents", "processor_json"]
EXPERT_INNER = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny(qwen2_5_vl.Tiny):  # type: ignore[misc]  # the installed package has no types
    """Sizes; `levels` are blocks after which one leaves, `experts` of a MoE decoder (0 for a dense one)."""

    naming: str = "model.visual."
    levels: tuple[int, ...] = (0, 2)
    table_side: int = 6
    experts: int = 0


DEFAULT = Tiny()
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 14, 20), (-1.0, -0.8118, -0.6, -0.3882, -0.1765, 0.0353, 0.302))


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    theirs = qwen2_5_vl.contents(tiny)
    files = {
        **theirs.files,
        "preprocessor_config.json": processor_json("image"),
        "video_preprocessor_config.json": processor_json("video"),
    }
    layer = parts.decoder_layer(tiny.text, head_norms=True)
    if tiny.experts:
        layer = {**layer, "mlp": experts(tiny)}
    tensors = qwen2_5_vl.tensors_of(tiny, tower(tiny), layer)
    return replace(theirs, config=config_json(tiny), files=files, tensors=tensors)


def config_json(tiny: Tiny) -> Json:
    theirs = qwen2_5_vl.config_json(tiny)
    kind = "qwen3_vl_moe" if tiny.experts else "qwen3_vl"
    third = tiny.text.head // 6
    text = {
        **theirs["text_config"],
        "model_type": f"{kind}_text", "head_dim": tiny.text.head, "attention_bias": False,
        "rope_parameters": {
            "rope_theta": 500000.0, "rope_type": "default", "mrope_interleaved": True,
            "mrope_section": [tiny.text.head // 2 - 2 * third, third, third],
        },
    }  # fmt: skip
    if tiny.experts:
        # Released files have norm_topk_prob, and vLLM reads it; transformers always normalises.
        text |= {"num_experts": tiny.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        text |= {"moe_intermediate_size": EXPERT_INNER}
    return {
        **theirs,
        "architectures": [f"Qwen3VL{'Moe' if tiny.experts else ''}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "vision_config": vision_json(tiny),
    }


def vision_json(tiny: Tiny) -> Json:
    return {
        "model_type": "qwen3_vl", "depth": tiny.depth, "num_heads": tiny.heads,
        "hidden_size": tiny.hidden, "intermediate_size": tiny.inner, "out_hidden_size": tiny.out,
        "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": tiny.table_side**2, "deepstack_visual_indexes": list(tiny.levels),
    }  # fmt: skip


def processor_json(kind: str) -> Json:
    least, most = (256**2, 4096**2) if kind == "image" else (4096, 256 * 32**2 * 96)
    settings = {
        **qwen2_5_vl.processor_json(kind),
        "processor_class": "Qwen3VLProcessor", "patch_size": 16,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": least, "longest_edge": most},
    }  # fmt: skip
    return settings | ({"video_processor_type": "Qwen3VLVideoProcessor"} if kind == "video" else {})


def tower(tiny: Tiny) -> Tree:
    hidden, wide = tiny.hidden, 4 * tiny.hidden
    layers = {"linear_fc1": parts.linear(wide, wide), "linear_fc2": parts.linear(tiny.out, wide)}
    names = "norm1 norm2 attn.qkv attn.proj mlp.linear_fc1 mlp.linear_fc2"
    return {
        "patch_embed.proj": parts.linear(hidden, 3, 2, 16, 16),
        # As large as a row of patches after the first layer.
        "pos_embed.weight": parts.weight(tiny.table_side**2, hidden, gain=hidden**0.5),
        "merger": {"norm": parts.norm(hidden), **layers},
        "deepstack_merger_list": [{"norm": parts.norm(wide), **layers}] * len(tiny.levels),
        "blocks": [parts.block(hidden, tiny.inner, names, gain=tiny.branch_gain)] * tiny.depth,
    }


def experts(tiny: Tiny) -> Tree:
    """Return experts and what chooses among them; stored with rows of the input, whatever the class has."""
    width, inner = tiny.text.width, EXPERT_INNER
    return {
        "gate.weight": parts.weight(tiny.experts, width),
        "experts.gate_up_proj": parts.weight(tiny.experts, width, 2 * inner, gain=(2 * inner) ** 0.5),
        "experts.down_proj": parts.weight(tiny.experts, inner, width, gain=width**0.5),
    }
