"""Contents of a tiny random Nemotron-Nano-VL checkpoint: config, tokenizer, tower, decoder of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlexport.recipes.demo import END, PAD, VOCAB_SIZE, Tensors, checkpoint_of, linear, norm

from vlexport.checkpoint import (
    CheckpointContents,
    RandomTensor,
    TokenizerContents,
    random_bias,
    random_scale,
    random_weight,
    special_token_id,
)

SPECIAL_TOKENS = (PAD, "<|im_start|>", END, "<img>", "</img>", "<image>", "<video>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{- part.text -}}
{%- else -%}
{{- '<' + part.type + '>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
LAYERS = ("linear_attention", "full_attention", "moe", "mlp", "linear_attention")
TEXT_HEADS, TEXT_KEYS, HEAD_DIM, TEXT_INNER, EXPERTS, EXPERT_INNER = 4, 2, 16, 96, 4, 32
MAMBA_HEADS, MAMBA_DIM, STATE, GROUPS, KERNEL = 4, 16, 16, 2, 4
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny:
    """Sizes; `table` is the side of the learned table of positions in patches.

    final_norm  whether the decoder has layers that predict further tokens, and the tower a norm behind it
    scaled      whether branches of blocks have stored scales
    tile        the side of tiles in pixels; 0 where images keep their resolution
    """

    depth: int = 3
    hidden: int = 48
    heads: int = 3
    patch: int = 16
    temporal: int = 2
    classes: int = 2
    registers: int = 3
    table: int = 8
    projector: int = 96
    out: int = 64
    least_patches: int = 16
    most_patches: int = 128
    video_patches: int = 64
    final_norm: bool = False
    scaled: bool = False
    tile: int = 0
    with_decoder: bool = True
    dtype: str = "float32"


DEFAULT = Tiny()
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 8, 14), (-0.6586, 0.2393, -0.5407, -0.7346, -0.6122, -0.482, -0.3892))
# Planted bugs are judged on these.
TRIALS = {
    "learned": Tiny(depth=2),
    "final norm": Tiny(depth=1, final_norm=True, scaled=True),
    "tiles": Tiny(depth=2, temporal=1, tile=64),
}


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    """Return what the demo writes, or a test with other sizes."""
    made: CheckpointContents = checkpoint_of(
        config_json(tiny),
        {"preprocessor_config.json": tile_json(tiny) if tiny.tile else processor_json(tiny)},
        TokenizerContents(special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE, max_length=4096),
        {**tower(tiny), **(decoder(tiny) if tiny.with_decoder else {})},
        tiny.dtype,
    )
    return made


def token(text: str) -> int:
    return special_token_id(SPECIAL_TOKENS, text)


def config_json(tiny: Tiny) -> dict[str, object]:
    found = resolution_json(tiny)
    if not tiny.tile:
        return found
    vision: Any = found["vision_config"]
    for name in ("max_img_size", "num_cls_tokens", "num_registers", "video_temporal_patch_size"):
        del vision[name]
    vision["args"] = {
        "cpe_max_size": tiny.table * tiny.patch,
        "cls_token_per_teacher": True,
        "register_multiple": tiny.classes + tiny.registers,
        "teachers": [{"name": f"teacher {number % tiny.classes}"} for number in range(tiny.classes + 1)],
    }
    del found["video_temporal_patch_size"]
    return {
        **found,
        "architectures": ["NemotronH_Nano_VL_V2"],
        "model_type": "NemotronH_Nano_VL_V2",
        "force_image_size": tiny.tile,
        "use_thumbnail": True,
        "ps_version": "v2",
    }


def tile_json(tiny: Tiny) -> dict[str, object]:
    return {
        "image_processor_type": "NemotronNanoVLV2ImageProcessor",
        "norm_mean": CLIP_MEAN,
        "norm_std": CLIP_STD,
        "image_size": tiny.tile,
        "max_num_tiles": 6,
        "use_thumbnail": True,
    }


def resolution_json(tiny: Tiny) -> dict[str, object]:
    return {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "nemotron_h_omni",
        "img_context_token_id": token("<image>"),
        "downsample_ratio": 0.5,
        "projector_hidden_size": tiny.projector,
        "vit_hidden_size": tiny.hidden,
        "video_temporal_patch_size": tiny.temporal,
        "dtype": tiny.dtype,
        "vision_config": {
            "model_type": "radio",
            "hidden_size": tiny.hidden,
            "num_hidden_layers": tiny.depth,
            "num_attention_heads": tiny.heads,
            "mlp_ratio": 2.0,
            "patch_size": tiny.patch,
            "max_img_size": tiny.table * tiny.patch,
            "num_cls_tokens": tiny.classes,
            "num_registers": tiny.registers,
            "video_temporal_patch_size": tiny.temporal,
        },
        "llm_config": {
            "model_type": "nemotron_h",
            "hidden_size": tiny.out,
            "layers_block_type": list(LAYERS),
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 4096,
            "num_attention_heads": TEXT_HEADS,
            "num_key_value_heads": TEXT_KEYS,
            "head_dim": HEAD_DIM,
            "intermediate_size": TEXT_INNER,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_INNER,
            "moe_shared_expert_intermediate_size": EXPERT_INNER,
            "mamba_num_heads": MAMBA_HEADS,
            "mamba_head_dim": MAMBA_DIM,
            "ssm_state_size": STATE,
            "n_groups": GROUPS,
            "conv_kernel": KERNEL,
            "bos_token_id": token(PAD),
            "eos_token_id": token(END),
            "pad_token_id": token(PAD),
            "num_nextn_predict_layers": int(tiny.final_norm),
        },
    }


def processor_json(tiny: Tiny) -> dict[str, object]:
    return {
        "image_processor_type": "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor",
        "norm_mean": CLIP_MEAN,
        "norm_std": CLIP_STD,
        "patch_size": tiny.patch,
        "downsample_ratio": 0.5,
        "min_num_patches": tiny.least_patches,
        "max_num_patches": tiny.most_patches,
        "max_model_len": 4096,
        "video_target_num_patches": tiny.video_patches,
        "video_maintain_aspect_ratio": True,
    }


def tower(tiny: Tiny) -> Tensors:
    """Return RADIO and projector; query and key rows doubled."""
    width, image = tiny.hidden, 3 * tiny.patch**2
    first = {
        "embedder.weight": random_weight(width, image),
        "pos_embed": RandomTensor(shape=(1, tiny.table**2, width), std=0.5),
        "cls_token.token": RandomTensor(shape=(tiny.classes + tiny.registers, width), std=1.0),
    }
    if tiny.temporal > 1:
        first["video_embedder.weight"] = random_weight(width, tiny.temporal * image)
    found = {f"model.patch_generator.{name}": each for name, each in first.items()}
    for index in range(tiny.depth):
        block = f"model.blocks.{index}"
        found |= norm(f"{block}.norm1", width) | norm(f"{block}.norm2", width)
        found |= linear(f"{block}.attn.qkv", 3 * width, width, doubled=2 * width)
        found |= linear(f"{block}.attn.proj", width, width)
        found |= linear(f"{block}.mlp.fc1", 2 * width, width) | linear(f"{block}.mlp.fc2", width, 2 * width)
        if tiny.scaled:
            found |= {f"{block}.layer_scale{place}.lambda1": random_scale(width) for place in (1, 2)}
    # transformers takes the normalisation out of the tower.
    found |= {
        f"input_conditioner.norm_{name}": RandomTensor(shape=(3, 1, 1), std=1.0) for name in ("mean", "std")
    }
    return {
        **{f"vision_model.radio_model.{name}": each for name, each in found.items()},
        "mlp1.0.weight": random_scale(4 * width),
        "mlp1.1.weight": random_weight(tiny.projector, 4 * width),
        "mlp1.3.weight": random_weight(tiny.out, tiny.projector),
    }


def decoder(tiny: Tiny) -> Tensors:
    """Return a decoder with layers of every kind, experts one by one, as NVIDIA's files have them."""
    width = tiny.out
    found = {"embeddings.weight": random_weight(VOCAB_SIZE, width), "norm_f.weight": random_scale(width)}
    made = {"linear_attention": mamba, "full_attention": attention, "moe": experts, "mlp": plain}
    for index, kind in enumerate(LAYERS):
        found[f"layers.{index}.norm.weight"] = random_scale(width)
        found |= {f"layers.{index}.mixer.{name}": each for name, each in made[kind](width).items()}
    return {
        **{f"language_model.backbone.{name}": each for name, each in found.items()},
        "language_model.lm_head.weight": random_weight(VOCAB_SIZE, width),
    }


def mamba(width: int) -> Tensors:
    inner = MAMBA_HEADS * MAMBA_DIM
    mixed = inner + 2 * GROUPS * STATE
    return {
        "in_proj.weight": random_weight(inner + mixed + MAMBA_HEADS, width),
        "conv1d.weight": random_weight(mixed, 1, KERNEL),
        "conv1d.bias": random_bias(mixed),
        "A_log": random_bias(MAMBA_HEADS),
        "D": random_scale(MAMBA_HEADS),
        "dt_bias": random_bias(MAMBA_HEADS),
        "norm.weight": random_scale(inner),
        "out_proj.weight": random_weight(width, inner),
    }


def attention(width: int) -> Tensors:
    rows, keys = TEXT_HEADS * HEAD_DIM, TEXT_KEYS * HEAD_DIM
    return {
        "q_proj.weight": random_weight(rows, width, doubled_rows=rows),
        "k_proj.weight": random_weight(keys, width, doubled_rows=keys),
        "v_proj.weight": random_weight(keys, width),
        "o_proj.weight": random_weight(width, rows),
    }


def experts(width: int) -> Tensors:
    parts = [f"experts.{expert}" for expert in range(EXPERTS)] + ["shared_experts"]
    layers = {f"{part}.{name}": each for part in parts for name, each in plain(width, EXPERT_INNER).items()}
    gate = {
        "gate.weight": random_weight(EXPERTS, width),
        "gate.e_score_correction_bias": random_bias(EXPERTS),
    }
    return {**gate, **layers}


def plain(width: int, inner: int = TEXT_INNER) -> Tensors:
    return {
        "up_proj.weight": random_weight(inner, width),
        "down_proj.weight": random_weight(width, inner),
    }
