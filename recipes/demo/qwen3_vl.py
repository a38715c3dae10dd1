"""Contents of a random Qwen3-VL checkpoint: tower, dense or MoE decoder; files as those of Qwen2.5-VL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlexport.recipes.demo import Tensors, linear, norm, qwen2_5_vl
from vlexport.recipes.demo.qwen2_5_vl import Text

from vlexport.checkpoint import CheckpointContents, random_scale, random_weight

__all__ = ["DEFAULT", "TRIALS", "Text", "Tiny", "contents"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny(qwen2_5_vl.Tiny):  # type: ignore[misc]  # the installed package has no types
    """Sizes; `levels` are blocks after which one leaves, `experts` of a MoE decoder (0 for a dense one).

    `released`: rotary settings as the first released checkpoints spell them.
    """

    naming: str = "model.visual."
    levels: tuple[int, ...] = (0, 2)
    table_side: int = 6
    experts: int = 0
    released: bool = False


DEFAULT = Tiny()
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 14, 20), (-1.0, -0.8118, -0.6, -0.3882, -0.1765, 0.0353, 0.302))
# Planted bugs are judged on it.
TRIALS = {"levels": Tiny(depth=3)}


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    """Return what the demo writes, or a test with other sizes."""
    theirs: CheckpointContents = qwen2_5_vl.contents(tiny)
    old = {tiny.naming + name for name in qwen2_5_vl.tower_tensors(tiny)}
    decoder = {name: kept for name, kept in theirs.tensors.items() if name not in old}
    tower = {tiny.naming + name: replace(tensor, stream=name) for name, tensor in tower_tensors(tiny).items()}
    files = {
        **theirs.files,
        "preprocessor_config.json": processor_json("image"),
        "video_preprocessor_config.json": processor_json("video"),
    }
    return replace(
        theirs, config=config_json(tiny), files=files, tensors={**tower, **decoder_tensors(tiny, decoder)}
    )


def config_json(tiny: Tiny) -> dict[str, object]:
    found = qwen2_5_vl.config_json(tiny)
    kind = "qwen3_vl_moe" if tiny.experts else "qwen3_vl"
    half = tiny.text.width // tiny.text.heads // 2
    rope = {"rope_theta": 500000.0, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    rope |= {"mrope_interleaved": True, "rope_type": "default"}
    text = {**qwen2_5_vl.text_json(tiny.text), "head_dim": 2 * half, "attention_bias": False}
    if tiny.experts:
        text |= {"num_experts": tiny.experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        # Released files have it, and vLLM reads it; transformers always normalises.
        text |= {"norm_topk_prob": True}
    if tiny.released:
        text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    else:
        text |= {"rope_parameters": rope}
    return {
        **found,
        "architectures": [f"Qwen3VL{'Moe' if tiny.experts else ''}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {**text, "model_type": f"{kind}_text"},
        "vision_config": vision_json(tiny),
    }


def vision_json(tiny: Tiny) -> dict[str, object]:
    return {
        "deepstack_visual_indexes": list(tiny.levels),
        "depth": tiny.depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": tiny.hidden,
        "in_channels": 3,
        "intermediate_size": tiny.inner,
        "model_type": "qwen3_vl",
        "num_heads": tiny.heads,
        "num_position_embeddings": tiny.table_side**2,
        "out_hidden_size": tiny.out,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def processor_json(kind: str) -> dict[str, object]:
    found = qwen2_5_vl.processor_json(kind)
    bounds = (256**2, 4096**2) if kind == "image" else (4096, 256 * 32**2 * 96)
    own: dict[str, object] = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": 16,
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": bounds[0], "longest_edge": bounds[1]},
    }
    return {**found, **own, **({"video_processor_type": "Qwen3VLVideoProcessor"} if kind == "video" else {})}


def tower_tensors(tiny: Tiny) -> Tensors:
    """Return vision tower and mergers, names without prefix; query and key rows doubled."""
    hidden, inner, wide = tiny.hidden, tiny.inner, 4 * tiny.hidden
    found = {
        **linear("patch_embed.proj", hidden, 3 * 2 * 16 * 16),
        "patch_embed.proj.weight": random_weight(hidden, 3, 2, 16, 16),
        # As large as a row of patches after the first layer.
        "pos_embed.weight": random_weight(tiny.table_side**2, hidden, gain=hidden**0.5),
    }
    mergers = {"merger": hidden, **{f"deepstack_merger_list.{at}": wide for at in range(len(tiny.levels))}}
    for name, width in mergers.items():
        found |= norm(f"{name}.norm", width)
        found |= linear(f"{name}.linear_fc1", wide, wide)
        found |= linear(f"{name}.linear_fc2", tiny.out, wide)
    block = {
        **norm("norm1", hidden),
        **norm("norm2", hidden),
        **linear("attn.qkv", 3 * hidden, hidden, doubled=2 * hidden),
        **linear("attn.proj", hidden, hidden, gain=tiny.branch_gain),
        **linear("mlp.linear_fc1", inner, hidden),
        **linear("mlp.linear_fc2", hidden, inner, gain=tiny.branch_gain),
    }
    for index in range(tiny.depth):
        found |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    return found


def decoder_tensors(tiny: Tiny, theirs: Tensors) -> Tensors:
    """Return the decoder of Qwen2.5-VL with norms of queries and keys, without biases, maybe with experts."""
    width, inner = tiny.text.width, 24
    dropped = (
        ".bias",
        *((".mlp.gate_proj.weight", ".mlp.up_proj.weight", ".mlp.down_proj.weight") if tiny.experts else ()),
    )
    kept = {name: tensor for name, tensor in theirs.items() if not name.endswith(dropped)}
    layer: Tensors = {
        f"self_attn.{name}_norm.weight": random_scale(width // tiny.text.heads) for name in "qk"
    }
    if tiny.experts:
        # Experts are stored with rows of the input, whatever the class has.
        layer |= {
            "mlp.gate.weight": random_weight(tiny.experts, width),
            "mlp.experts.gate_up_proj": random_weight(
                tiny.experts, width, 2 * inner, gain=(2 * inner) ** 0.5
            ),
            "mlp.experts.down_proj": random_weight(tiny.experts, inner, width, gain=width**0.5),
        }
    for index in range(tiny.text.layers if tiny.with_decoder else 0):
        place = f"layers.{index}."
        kept |= {
            f"model.language_model.{place}{name}": replace(tensor, stream=f"decoder.{place}{name}")
            for name, tensor in layer.items()
        }
    return kept
