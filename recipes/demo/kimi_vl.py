"""Contents of a tiny random Kimi-VL checkpoint: config, tokenizer, tower, a decoder with experts."""

from __future__ import annotations

from dataclasses import dataclass

from vlexport.recipes.demo import parts
from vlexport.recipes.demo.parts import END, PAD, Json, Text, Tree
from vlexport.recipes.demo.writing import CheckpointContents, TokenizerContents

SPECIAL_TOKENS = (
    PAD, "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", END,
    "<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>",
)  # fmt: skip
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' -}}
{%- endif -%}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|media_start|>image<|media_content|><|media_pad|><|media_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_assistant|>assistant<|im_middle|>' -}}
{%- endif -%}
"""
TOKENIZER = TokenizerContents(special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE)
token = TOKENIZER.token_id
PATCH = 14
EXPERTS, EXPERT_INNER, KEYS_LORA, ROPE_DIM, NOPE_DIM, VALUE_DIM = 4, 32, 16, 8, 16, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny:
    """Sizes; `table` are the sides of the learned table of positions."""

    depth: int = 3
    hidden: int = 48
    heads: int = 3
    inner: int = 80
    out: int = 64
    table: tuple[int, int] = (8, 16)
    most_patches: int = 256
    with_decoder: bool = True
    dtype: str = "float32"


DEFAULT = Tiny()
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 14, 20), (-0.8667, -0.2784, 0.2627, 0.2000, 0.0431, -0.2157, -0.4980))


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    tree = {"vision_tower": tower(tiny), "multi_modal_projector": projector(tiny)}
    if tiny.with_decoder:
        tree["language_model"] = language_model(text_of(tiny))
    files = {"preprocessor_config.json": processor_json(tiny)}
    return parts.checkpoint_of(config_json(tiny), files, TOKENIZER, parts.named(tree))


def text_of(tiny: Tiny) -> Text:
    return Text(width=tiny.out, kv_heads=4, inner=96)


def config_json(tiny: Tiny) -> Json:
    text = {
        **parts.text_json(text_of(tiny), TOKENIZER),
        "model_type": "deepseek_v3", "rms_norm_eps": 1e-05, "rope_theta": 800000.0, "rope_scaling": None,
        "attention_bias": False, "q_lora_rank": None, "kv_lora_rank": KEYS_LORA,
        "qk_rope_head_dim": ROPE_DIM, "qk_nope_head_dim": NOPE_DIM, "v_head_dim": VALUE_DIM,
        "n_routed_experts": EXPERTS, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INNER, "moe_layer_freq": 1, "first_k_dense_replace": 1,
        "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.446,
    }  # fmt: skip
    vision = {
        "model_type": "moonvit", "patch_size": PATCH, "merge_kernel_size": [2, 2],
        "num_attention_heads": tiny.heads, "num_hidden_layers": tiny.depth,
        "hidden_size": tiny.hidden, "intermediate_size": tiny.inner,
        "init_pos_emb_height": tiny.table[0], "init_pos_emb_width": tiny.table[1],
    }  # fmt: skip
    return {
        "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl",
        "auto_map": {"AutoModel": "modeling_kimi_vl.KimiVLForConditionalGeneration"},
        "media_placeholder_token_id": token("<|media_pad|>"), "dtype": tiny.dtype,
        "text_config": text, "vision_config": vision,
    }  # fmt: skip


def processor_json(tiny: Tiny) -> Json:
    return {
        "image_processor_type": "KimiVLImageProcessor", "patch_size": PATCH,
        "in_token_limit": tiny.most_patches, "num_pooled_tokens": 1024, "pad_input": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip


def tower(tiny: Tiny) -> Tree:
    width = tiny.hidden
    block = parts.block(width, tiny.inner, "norm0 norm1 wqkv wo mlp.fc0 mlp.fc1")
    return {
        "patch_embed.proj": parts.linear(width, 3, PATCH, PATCH),
        # Larger ones hide the epsilon of the first norm when pixels are faint.
        "patch_embed.pos_emb.weight": parts.normal(*tiny.table, width, std=0.2),
        "encoder.blocks": [block] * tiny.depth,
        "encoder.final_layernorm": parts.norm(width),
    }


def projector(tiny: Tiny) -> Tree:
    wide = 4 * tiny.hidden
    return {
        "pre_norm": parts.norm(tiny.hidden),
        "linear_1": parts.linear(wide, wide),
        "linear_2": parts.linear(tiny.out, wide),
    }


def language_model(text: Text) -> Tree:
    """Return a decoder under DeepSeek-V3's names: latent keys and values, experts from layer 1 on."""
    width, heads = text.width, text.heads
    layer = {
        "input_layernorm.weight": parts.scale(width),
        "post_attention_layernorm.weight": parts.scale(width),
        "self_attn": {
            "q_proj.weight": parts.weight(heads * (NOPE_DIM + ROPE_DIM), width),
            "kv_a_proj_with_mqa.weight": parts.weight(KEYS_LORA + ROPE_DIM, width),
            "kv_a_layernorm.weight": parts.scale(KEYS_LORA),
            "kv_b_proj.weight": parts.weight(heads * (NOPE_DIM + VALUE_DIM), KEYS_LORA),
            "o_proj.weight": parts.weight(width, heads * VALUE_DIM),
        },
    }
    experts = {
        "shared_experts": parts.gated(width, 2 * EXPERT_INNER),
        "experts": [parts.gated(width, EXPERT_INNER)] * EXPERTS,
        "gate": {"weight": parts.weight(EXPERTS, width), "e_score_correction_bias": parts.bias(EXPERTS)},
    }
    layers = [{**layer, "mlp": parts.gated(width, text.inner)}, {**layer, "mlp": experts}]
    return {"model": parts.decoder(text, layers), "lm_head.weight": parts.weight(text.vocabulary, width)}
