"""Contents of tiny random MiniCPM-V checkpoints, one release or another: config, tokenizer, tensors."""

from __future__ import annotations

from dataclasses import dataclass

from vlexport.recipes.demo import END, PAD, VOCAB_SIZE, Tensors, checkpoint_of, decoder_layer, linear, norm

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
TEXT_HEADS, TEXT_KV_HEADS, TEXT_LAYERS, TEXT_INNER = 4, 2, 2, 128
PATCH = 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny:
    """Sizes; `side` is that of the table of positions, `drop_last` leaves the last stored layer out.

    `other_parts` adds what a tower must not read: its head, audio and speech.
    """

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
    other_parts: bool = False
    with_decoder: bool = True
    dtype: str = "float32"

    @property
    def oldest(self) -> bool:
        return self.version == "2.0"


DEFAULT = Tiny()
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 16, 24), (-0.0039, 0.4275, -0.0902, 0.3647, -0.0902, -0.4431, 0.0510))
# What planted bugs are judged on; the first stores a layer more than it runs.
TRIALS = {
    "slices": Tiny(drop_last=True),
    "slice times": Tiny(version="4.5", depth=2),
    "learned places": Tiny(version="2.0", depth=2),
    "places in a line": Tiny(version="2.5", depth=2),
}


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    """Return what the demo writes, or a test with other sizes."""
    parts = {"vpm.": oldest_tower(tiny) if tiny.oldest else later_tower(tiny), "resampler.": resampler(tiny)}
    if tiny.with_decoder:
        parts["llm."] = decoder(tiny)
    if tiny.other_parts:
        parts[""] = other_parts()
    made: CheckpointContents = checkpoint_of(
        config_json(tiny),
        {} if tiny.oldest else {"preprocessor_config.json": processor_json(tiny)},
        TokenizerContents(special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE, max_length=4096),
        {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()},
        tiny.dtype,
    )
    return made


def token(text: str) -> int:
    return special_token_id(SPECIAL_TOKENS, text)


def config_json(tiny: Tiny) -> dict[str, object]:
    own = oldest_json(tiny) if tiny.oldest else {"slice_config": {"max_slice_nums": 9, "patch_size": PATCH}}
    return {
        "architectures": ["MiniCPMV"],
        "model_type": "minicpmv",
        "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"},
        "version": tiny.version,
        "query_num": tiny.queries,
        "drop_vision_last_layer": tiny.drop_last,
        "vision_config": {
            "hidden_size": tiny.hidden,
            "intermediate_size": tiny.inner,
            "num_hidden_layers": tiny.depth,
            "num_attention_heads": tiny.heads,
            "image_size": tiny.side * PATCH,
            "patch_size": PATCH,
        },
        "dtype": tiny.dtype,
        **text_json(tiny),
        **own,
    }


def text_json(tiny: Tiny) -> dict[str, object]:
    return {
        "bos_token_id": token(PAD),
        "eos_token_id": token(END),
        "head_dim": tiny.out // TEXT_HEADS,
        "pad_token_id": token(PAD),
        "hidden_act": "silu",
        "hidden_size": tiny.out,
        "intermediate_size": TEXT_INNER,
        "max_position_embeddings": 4096,
        "num_attention_heads": TEXT_HEADS,
        "num_hidden_layers": TEXT_LAYERS,
        "num_key_value_heads": TEXT_KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
    }


def oldest_json(tiny: Tiny) -> dict[str, object]:
    """Return the config of 2.0, with the settings of its image processor and the scales of its decoder."""
    return {
        "vision_encoder": "vit_so400m_patch14_siglip_384.webli",
        **cut_json(tiny),
        "scale_emb": 12,
        "dim_model_base": tiny.out // 4,
        "scale_depth": 1.4,
    }


def cut_json(tiny: Tiny) -> dict[str, object]:
    return {"slice_mode": True, "max_slice_nums": 9, "scale_resolution": tiny.slice_side, "patch_size": PATCH}


def processor_json(tiny: Tiny) -> dict[str, object]:
    return {
        "image_processor_type": "MiniCPMVImageProcessor",
        "processor_class": "MiniCPMVProcessor",
        **cut_json(tiny),
        "use_image_id": tiny.version != "2.5",
        "image_feature_size": tiny.queries,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "version": tiny.version,
    }


def later_tower(tiny: Tiny) -> Tensors:
    """Return SigLIP with bucketed positions, names below `vpm.`; query and key rows doubled."""
    width = tiny.hidden
    found = {
        "embeddings.patch_embedding.weight": random_weight(width, 3, PATCH, PATCH),
        "embeddings.patch_embedding.bias": random_bias(width),
        "embeddings.position_embedding.weight": places(tiny.side**2, width),
        **norm("post_layernorm", width),
    }
    for index in range(tiny.depth):
        layer = f"encoder.layers.{index}"
        found |= norm(f"{layer}.layer_norm1", width) | norm(f"{layer}.layer_norm2", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= linear(
                f"{layer}.self_attn.{name}", width, width, doubled=width if name[0] in "qk" else 0
            )
        found |= linear(f"{layer}.mlp.fc1", tiny.inner, width) | linear(f"{layer}.mlp.fc2", width, tiny.inner)
    return found


def oldest_tower(tiny: Tiny) -> Tensors:
    """Return the same tower under timm's names, its projections fused."""
    width = tiny.hidden
    found = {
        "patch_embed.proj.weight": random_weight(width, 3, PATCH, PATCH),
        "patch_embed.proj.bias": random_bias(width),
        "pos_embed": places(1, tiny.side**2, width),
        **norm("norm", width),
    }
    for index in range(tiny.depth):
        block = f"blocks.{index}"
        found |= norm(f"{block}.norm1", width) | norm(f"{block}.norm2", width)
        found |= linear(f"{block}.attn.qkv", 3 * width, width, doubled=2 * width)
        found |= linear(f"{block}.attn.proj", width, width)
        found |= linear(f"{block}.mlp.fc1", tiny.inner, width) | linear(f"{block}.mlp.fc2", width, tiny.inner)
    return found


def resampler(tiny: Tiny) -> Tensors:
    width = tiny.out
    projection = {} if width == tiny.hidden else {"kv_proj.weight": random_weight(width, tiny.hidden)}
    learned = {"pos_embed": table(tiny.queries, width)} if tiny.oldest else {}
    return {
        "query": table(tiny.queries, width),
        "proj": random_weight(width, width),
        **projection,
        "attn.in_proj_weight": random_weight(3 * width, width, doubled_rows=2 * width),
        "attn.in_proj_bias": random_bias(3 * width, doubled_rows=2 * width),
        **linear("attn.out_proj", width, width),
        **norm("ln_q", width),
        **norm("ln_kv", width),
        **norm("ln_post", width),
        **learned,
    }


def other_parts() -> Tensors:
    names = ("vpm.head.probe", "apm.conv1.weight", "audio_projection_layer.linear1.weight", "tts.emb.weight")
    return {name: random_weight(4, 4) for name in names}


def decoder(tiny: Tiny) -> Tensors:
    """Return a decoder under Llama's names; 2.6 has Qwen2's biases too, 4.5 the head norms of Qwen3."""
    width, head = tiny.out, tiny.out // TEXT_HEADS
    found = {
        "model.embed_tokens.weight": random_weight(VOCAB_SIZE, width),
        "model.norm.weight": random_scale(width),
        "lm_head.weight": random_weight(VOCAB_SIZE, width),
    }
    layer = decoder_layer(width, head * TEXT_KV_HEADS, TEXT_INNER, biases=tiny.version == "2.6")
    if tiny.version == "4.5":
        layer |= {f"self_attn.{name}_norm.weight": random_scale(head) for name in "qk"}
    for index in range(TEXT_LAYERS):
        found |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return found


def table(*shape: int) -> RandomTensor:
    """Return queries and their places, as large as what they are added to."""
    return RandomTensor(shape=shape, std=1.0)


def places(*shape: int) -> RandomTensor:
    """Return positions of the tower; larger ones hide the epsilon of the first norm when pixels are faint."""
    return RandomTensor(shape=shape, std=0.2)
