"""Contents of a tiny random Nemotron-Nano-VL checkpoint: config, tokenizer, tower, decoder of all layers."""

from __future__ import annotations

from dataclasses import dataclass

from vlexport.recipes.demo import parts
from vlexport.recipes.demo.parts import CLIP_MEAN, CLIP_STD, END, PAD, VOCAB_SIZE, Json, Tree
from vlexport.recipes.demo.writing import CheckpointContents, TokenizerContents

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
TOKENIZER = TokenizerContents(special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE)
token = TOKENIZER.token_id
LAYERS = ("linear_attention", "full_attention", "moe", "mlp", "linear_attention")
TEXT_HEADS, TEXT_KEYS, HEAD_DIM, TEXT_INNER, EXPERTS, EXPERT_INNER = 4, 2, 16, 96, 4, 32
MAMBA_HEADS, MAMBA_DIM, STATE, GROUPS, KERNEL = 4, 16, 16, 2, 4


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


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    tree = {
        "vision_model.radio_model": tower(tiny),
        "mlp1.0.weight": parts.scale(4 * tiny.hidden),
        "mlp1.1.weight": parts.weight(tiny.projector, 4 * tiny.hidden),
        "mlp1.3.weight": parts.weight(tiny.out, tiny.projector),
        "language_model": language_model(tiny.out) if tiny.with_decoder else {},
    }
    files = {"preprocessor_config.json": tile_json(tiny) if tiny.tile else processor_json(tiny)}
    return parts.checkpoint_of(config_json(tiny), files, TOKENIZER, parts.named(tree))


def config_json(tiny: Tiny) -> Json:
    vision = {
        "model_type": "radio", "patch_size": tiny.patch, "hidden_size": tiny.hidden, "mlp_ratio": 2.0,
        "num_hidden_layers": tiny.depth, "num_attention_heads": tiny.heads,
    }  # fmt: skip
    common = {
        "img_context_token_id": token("<image>"), "downsample_ratio": 0.5, "dtype": tiny.dtype,
        "vit_hidden_size": tiny.hidden, "projector_hidden_size": tiny.projector,
        "llm_config": text_json(tiny),
    }  # fmt: skip
    if tiny.tile:
        teachers = [{"name": f"teacher {number % tiny.classes}"} for number in range(tiny.classes + 1)]
        vision["args"] = {
            "cpe_max_size": tiny.table * tiny.patch, "cls_token_per_teacher": True, "teachers": teachers,
            "register_multiple": tiny.classes + tiny.registers,
        }  # fmt: skip
        return {
            "architectures": ["NemotronH_Nano_VL_V2"], "model_type": "NemotronH_Nano_VL_V2",
            "force_image_size": tiny.tile, "use_thumbnail": True, "ps_version": "v2",
            **common, "vision_config": vision,
        }  # fmt: skip
    vision |= {
        "max_img_size": tiny.table * tiny.patch, "video_temporal_patch_size": tiny.temporal,
        "num_cls_tokens": tiny.classes, "num_registers": tiny.registers,
    }  # fmt: skip
    return {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni",
        "video_temporal_patch_size": tiny.temporal, **common, "vision_config": vision,
    }  # fmt: skip


def text_json(tiny: Tiny) -> Json:
    return {
        "model_type": "nemotron_h", "hidden_size": tiny.out, "layers_block_type": list(LAYERS),
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096,
        **parts.ends(TOKENIZER),
        "num_attention_heads": TEXT_HEADS, "num_key_value_heads": TEXT_KEYS, "head_dim": HEAD_DIM,
        "intermediate_size": TEXT_INNER, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INNER, "moe_shared_expert_intermediate_size": EXPERT_INNER,
        "mamba_num_heads": MAMBA_HEADS, "mamba_head_dim": MAMBA_DIM,
        "ssm_state_size": STATE, "n_groups": GROUPS, "conv_kernel": KERNEL,
        "num_nextn_predict_layers": int(tiny.final_norm),
    }  # fmt: skip


def tile_json(tiny: Tiny) -> Json:
    return {
        "image_processor_type": "NemotronNanoVLV2ImageProcessor", "image_size": tiny.tile,
        "norm_mean": CLIP_MEAN, "norm_std": CLIP_STD, "max_num_tiles": 6, "use_thumbnail": True,
    }  # fmt: skip


def processor_json(tiny: Tiny) -> Json:
    return {
        "image_processor_type": "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor",
        "norm_mean": CLIP_MEAN, "norm_std": CLIP_STD, "patch_size": tiny.patch, "downsample_ratio": 0.5,
        "min_num_patches": tiny.least_patches, "max_num_patches": tiny.most_patches, "max_model_len": 4096,
        "video_target_num_patches": tiny.video_patches, "video_maintain_aspect_ratio": True,
    }  # fmt: skip


def tower(tiny: Tiny) -> Tree:
    width, image = tiny.hidden, 3 * tiny.patch**2
    later = {"video_embedder.weight": parts.weight(width, tiny.temporal * image)} if tiny.temporal > 1 else {}
    scales = {f"layer_scale{place}.lambda1": parts.scale(width) for place in (1, 2)} if tiny.scaled else {}
    # transformers takes the normalisation out of the tower.
    norms = {f"norm_{name}": parts.normal(3, 1, 1, std=1.0) for name in ("mean", "std")}
    return {
        "model.patch_generator": {
            "embedder.weight": parts.weight(width, image),
            **later,
            "pos_embed": parts.normal(1, tiny.table**2, width, std=0.5),
            "cls_token.token": parts.normal(tiny.classes + tiny.registers, width, std=1.0),
        },
        "model.blocks": [{**parts.block(width, 2 * width), **scales}] * tiny.depth,
        "input_conditioner": norms,
    }


def language_model(width: int) -> Tree:
    """Return a decoder with layers of every kind, experts one by one, as NVIDIA's files have them."""
    mixers = {
        "linear_attention": mamba(width),
        "full_attention": attention(width),
        "moe": experts(width),
        "mlp": plain(width, TEXT_INNER),
    }
    return {
        "backbone.embeddings.weight": parts.weight(VOCAB_SIZE, width),
        "backbone.layers": [{"norm.weight": parts.scale(width), "mixer": mixers[kind]} for kind in LAYERS],
        "backbone.norm_f.weight": parts.scale(width),
        "lm_head.weight": parts.weight(VOCAB_SIZE, width),
    }


def mamba(width: int) -> Tree:
    inner = MAMBA_HEADS * MAMBA_DIM
    mixed = inner + 2 * GROUPS * STATE
    return {
        "in_proj.weight": parts.weight(inner + mixed + MAMBA_HEADS, width),
        "conv1d": {"weight": parts.weight(mixed, 1, KERNEL), "bias": parts.bias(mixed)},
        "A_log": parts.bias(MAMBA_HEADS),
        "D": parts.scale(MAMBA_HEADS),
        "dt_bias": parts.bias(MAMBA_HEADS),
        "norm.weight": parts.scale(inner),
        "out_proj.weight": parts.weight(width, inner),
    }


def attention(width: int) -> Tree:
    rows, keys = TEXT_HEADS * HEAD_DIM, TEXT_KEYS * HEAD_DIM
    return {
        "q_proj.weight": parts.weight(rows, width, doubled=rows),
        "k_proj.weight": parts.weight(keys, width, doubled=keys),
        "v_proj.weight": parts.weight(keys, width),
        "o_proj.weight": parts.weight(width, rows),
    }


def experts(width: int) -> Tree:
    return {
        "gate": {"weight": parts.weight(EXPERTS, width), "e_score_correction_bias": parts.bias(EXPERTS)},
        "experts": [plain(width, EXPERT_INNER)] * EXPERTS,
        "shared_experts": plain(width, EXPERT_INNER),
    }


def plain(width: int, inner: int) -> Tree:
    return {"up_proj.weight": parts.weight(inner, width), "down_proj.weight": parts.weight(width, inner)}
