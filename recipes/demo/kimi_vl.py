"""Contents of a tiny random Kimi-VL checkpoint: config, tokenizer, tower, a decoder with experts."""

from __future__ import annotations

from dataclasses import dataclass

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
PATCH = 14
TEXT_LAYERS, TEXT_HEADS, TEXT_INNER, EXPERTS, EXPERT_INNER = 2, 4, 96, 4, 32
KEYS_LORA, ROPE_DIM, NOPE_DIM, VALUE_DIM = 16, 8, 16, 16


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
# Planted bugs are judged on these.
TRIALS = {"native": Tiny(depth=2)}


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    """Return what the demo writes, or a test with other sizes."""
    parts = {"vision_tower.": tower(tiny), "multi_modal_projector.": projector(tiny)}
    if tiny.with_decoder:
        parts["language_model."] = decoder(tiny)
    made: CheckpointContents = checkpoint_of(
        config_json(tiny),
        {"preprocessor_config.json": processor_json(tiny)},
        TokenizerContents(special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE, max_length=4096),
        {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()},
        tiny.dtype,
    )
    return made


def token(text: str) -> int:
    return special_token_id(SPECIAL_TOKENS, text)


def config_json(tiny: Tiny) -> dict[str, object]:
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "auto_map": {"AutoModel": "modeling_kimi_vl.KimiVLForConditionalGeneration"},
        "media_placeholder_token_id": token("<|media_pad|>"),
        "dtype": tiny.dtype,
        "vision_config": {
            "model_type": "moonvit",
            "patch_size": PATCH,
            "num_attention_heads": tiny.heads,
            "num_hidden_layers": tiny.depth,
            "hidden_size": tiny.hidden,
            "intermediate_size": tiny.inner,
            "init_pos_emb_height": tiny.table[0],
            "init_pos_emb_width": tiny.table[1],
            "merge_kernel_size": [2, 2],
        },
        "text_config": text_json(tiny),
    }


def text_json(tiny: Tiny) -> dict[str, object]:
    return {
        "model_type": "deepseek_v3",
        "bos_token_id": token(PAD),
        "eos_token_id": token(END),
        "pad_token_id": token(PAD),
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "hidden_size": tiny.out,
        "hidden_act": "silu",
        "intermediate_size": TEXT_INNER,
        "moe_intermediate_size": EXPERT_INNER,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": TEXT_HEADS,
        "num_key_value_heads": TEXT_HEADS,
        "n_shared_experts": 2,
        "n_routed_experts": EXPERTS,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": KEYS_LORA,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": VALUE_DIM,
        "qk_nope_head_dim": NOPE_DIM,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "rms_norm_eps": 1e-05,
        "rope_theta": 800000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def processor_json(tiny: Tiny) -> dict[str, object]:
    return {
        "image_processor_type": "KimiVLImageProcessor",
        "in_token_limit": tiny.most_patches,
        "patch_size": PATCH,
        "num_pooled_tokens": 1024,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "pad_input": True,
    }


def tower(tiny: Tiny) -> Tensors:
    """Return MoonViT, names below `vision_tower.`; query and key rows doubled."""
    width = tiny.hidden
    found = {
        "patch_embed.proj.weight": random_weight(width, 3, PATCH, PATCH),
        "patch_embed.proj.bias": random_bias(width),
        # Larger ones hide the epsilon of the first norm when pixels are faint.
        "patch_embed.pos_emb.weight": RandomTensor(shape=(*tiny.table, width), std=0.2),
        **norm("encoder.final_layernorm", width),
    }
    for index in range(tiny.depth):
        block = f"encoder.blocks.{index}"
        found |= norm(f"{block}.norm0", width) | norm(f"{block}.norm1", width)
        found |= linear(f"{block}.wqkv", 3 * width, width, doubled=2 * width)
        found |= linear(f"{block}.wo", width, width)
        found |= linear(f"{block}.mlp.fc0", tiny.inner, width) | linear(f"{block}.mlp.fc1", width, tiny.inner)
    return found


def projector(tiny: Tiny) -> Tensors:
    wide = 4 * tiny.hidden
    return {
        **norm("pre_norm", tiny.hidden),
        **linear("linear_1", wide, wide),
        **linear("linear_2", tiny.out, wide),
    }


def decoder(tiny: Tiny) -> Tensors:
    """Return a decoder under DeepSeek-V3's names: latent keys and values, experts from layer 1 on."""
    width, heads = tiny.out, TEXT_HEADS
    found = {
        "model.embed_tokens.weight": random_weight(VOCAB_SIZE, width),
        "model.norm.weight": random_scale(width),
        "lm_head.weight": random_weight(VOCAB_SIZE, width),
    }
    for index in range(TEXT_LAYERS):
        layer = f"model.layers.{index}"
        found |= {f"{layer}.{name}.weight": random_scale(width) for name in NORMS}
        found |= {
            f"{layer}.self_attn.q_proj.weight": random_weight(heads * (NOPE_DIM + ROPE_DIM), width),
            f"{layer}.self_attn.kv_a_proj_with_mqa.weight": random_weight(KEYS_LORA + ROPE_DIM, width),
            f"{layer}.self_attn.kv_a_layernorm.weight": random_scale(KEYS_LORA),
            f"{layer}.self_attn.kv_b_proj.weight": random_weight(heads * (NOPE_DIM + VALUE_DIM), KEYS_LORA),
            f"{layer}.self_attn.o_proj.weight": random_weight(width, heads * VALUE_DIM),
        }
        if index == 0:
            found |= mlp(f"{layer}.mlp", width, TEXT_INNER)
            continue
        found |= mlp(f"{layer}.mlp.shared_experts", width, 2 * EXPERT_INNER)
        for expert in range(EXPERTS):
            found |= mlp(f"{layer}.mlp.experts.{expert}", width, EXPERT_INNER)
        found[f"{layer}.mlp.gate.weight"] = random_weight(EXPERTS, width)
        found[f"{layer}.mlp.gate.e_score_correction_bias"] = random_bias(EXPERTS)
    return found


NORMS = ("input_layernorm", "post_attention_layernorm")


def mlp(name: str, width: int, inner: int) -> Tensors:
    return {
        f"{name}.gate_proj.weight": random_weight(inner, width),
        f"{name}.up_proj.weight": random_weight(inner, width),
        f"{name}.down_proj.weight": random_weight(width, inner),
    }
