"""Contents of tiny random MiniCPM-V checkpoints, one release or another: config, tokenizer, tensors."""

from __future__ import annotations

from dataclasses import dataclass

from vlexport.recipes.demo import parts
from vlexport.recipes.demo.parts import END, PAD, Json, Text, Tree
from vlexport.recipes.demo.writing import CheckpointContents, TokenizerContents

SPECIAL_TOKENS = (
    PAD, "<unk>", "<|im_start|>", END,
    "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>",
)  # fmt: skip
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
TOKENIZER = TokenizerContents(special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE)
PATCH = 14
# Larger positions of the tower hide the epsilon of the first norm when pixels are faint.
PLACES = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny:
    """Sizes; `side` is that of the table of positions, `drop_last` leaves the last stored layer out."""

    version: str = "2.6"
    depth: int = 3
    hidden: int = 32
    heads: int = 2
    inner: int = 48
    side: int = 10
    queries: int = 4
    out: int = 256
    slice_side: int = 112
    drop_last: bool = False
    with_decoder: bool = True
    dtype: str = "float32"

    @property
    def oldest(self) -> bool:
        return self.version == "2.0"


DEFAULT = Tiny()
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 16, 24), (-0.0039, 0.4275, -0.0902, 0.3647, -0.0902, -0.4431, 0.0510))


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    tree = {"vpm": oldest_tower(tiny) if tiny.oldest else later_tower(tiny), "resampler": resampler(tiny)}
    if tiny.with_decoder:
        tree["llm"] = language_model(tiny)
    files = {} if tiny.oldest else {"preprocessor_config.json": processor_json(tiny)}
    return parts.checkpoint_of(config_json(tiny), files, TOKENIZER, parts.named(tree))


def config_json(tiny: Tiny) -> Json:
    text = Text(width=tiny.out)
    # 2.0 has the settings of its image processor and the scales of its decoder here.
    own = {"slice_config": {"max_slice_nums": 9, "patch_size": PATCH}} if not tiny.oldest else {
        "vision_encoder": "vit_so400m_patch14_siglip_384.webli", **cut_json(tiny),
        "scale_emb": 12, "dim_model_base": tiny.out // 4, "scale_depth": 1.4,
    }  # fmt: skip
    return {
        "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": tiny.version,
        "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"},
        "query_num": tiny.queries, "drop_vision_last_layer": tiny.drop_last, "dtype": tiny.dtype,
        "vision_config": {
            "hidden_size": tiny.hidden, "intermediate_size": tiny.inner,
            "num_hidden_layers": tiny.depth, "num_attention_heads": tiny.heads,
            "image_size": tiny.side * PATCH, "patch_size": PATCH,
        },
        **parts.text_json(text, TOKENIZER), "head_dim": text.head, "rope_theta": 10000.0, **own,
    }  # fmt: skip


def cut_json(tiny: Tiny) -> Json:
    return {"slice_mode": True, "max_slice_nums": 9, "scale_resolution": tiny.slice_side, "patch_size": PATCH}


def processor_json(tiny: Tiny) -> Json:
    return {
        "image_processor_type": "MiniCPMVImageProcessor", "processor_class": "MiniCPMVProcessor",
        **cut_json(tiny), "use_image_id": tiny.version != "2.5", "image_feature_size": tiny.queries,
        "norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5], "version": tiny.version,
    }  # fmt: skip


def later_tower(tiny: Tiny) -> Tree:
    """Return SigLIP with bucketed positions; query and key rows doubled."""
    width = tiny.hidden
    layer = {
        "layer_norm1": parts.norm(width),
        "layer_norm2": parts.norm(width),
        "self_attn": {
            "q_proj": parts.linear(width, width, doubled=width),
            "k_proj": parts.linear(width, width, doubled=width),
            "v_proj": parts.linear(width, width),
            "out_proj": parts.linear(width, width),
        },
        "mlp": {"fc1": parts.linear(tiny.inner, width), "fc2": parts.linear(width, tiny.inner)},
    }
    return {
        "embeddings.patch_embedding": parts.linear(width, 3, PATCH, PATCH),
        "embeddings.position_embedding.weight": parts.normal(tiny.side**2, width, std=PLACES),
        "encoder.layers": [layer] * tiny.depth,
        "post_layernorm": parts.norm(width),
    }


def oldest_tower(tiny: Tiny) -> Tree:
    """Return the same tower under timm's names, its projections fused."""
    width = tiny.hidden
    return {
        "patch_embed.proj": parts.linear(width, 3, PATCH, PATCH),
        "pos_embed": parts.normal(1, tiny.side**2, width, std=PLACES),
        "blocks": [parts.block(width, tiny.inner)] * tiny.depth,
        "norm": parts.norm(width),
    }


def resampler(tiny: Tiny) -> Tree:
    width = tiny.out
    # Queries and their places are as large as what they are added to.
    table = parts.normal(tiny.queries, width, std=1.0)
    return {
        "query": table,
        "proj": parts.weight(width, width),
        "kv_proj": {} if width == tiny.hidden else {"weight": parts.weight(width, tiny.hidden)},
        "attn.in_proj_weight": parts.weight(3 * width, width, doubled=2 * width),
        "attn.in_proj_bias": parts.bias(3 * width, doubled=2 * width),
        "attn.out_proj": parts.linear(width, width),
        **{name: parts.norm(width) for name in ("ln_q", "ln_kv", "ln_post")},
        **({"pos_embed": table} if tiny.oldest else {}),
    }


def language_model(tiny: Tiny) -> Tree:
    """Return a decoder under Llama's names; 2.6 has Qwen2's biases too, 4.5 the head norms of Qwen3."""
    text = Text(width=tiny.out)
    layer = parts.decoder_layer(text, biases=tiny.version == "2.6", head_norms=tiny.version == "4.5")
    return {
        "model": parts.decoder(text, [layer] * text.layers),
        "lm_head.weight": parts.weight(text.vocabulary, text.width),
    }
