"""What tiny random MiniCPM-V checkpoints hold, one release or another: config, tokenizer, tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlexport.checkpoint import (
    NUM_BYTE_TOKENS,
    CheckpointContents,
    RandomTensor,
    TokenizerContents,
    random_bias,
    random_scale,
    random_weight,
    special_token_id,
)

END, PAD, SLOT = "<|im_end|>", "<|endoftext|>", "<unk>"
SPECIAL_TOKENS = (
    PAD, SLOT, "<|im_start|>", END,
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
# A quarter above what the tokenizer needs: real vocabularies are padded too.
VOCAB_SIZE = NUM_BYTE_TOKENS + 64
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
    tower = oldest_tower(tiny) if tiny.oldest else later_tower(tiny)
    return CheckpointContents(
        config=config_json(tiny),
        files={
            "generation_config.json": {
                "do_sample": False,
                "eos_token_id": [token(END), token(PAD)],
                "pad_token_id": token(PAD),
            },
            **({} if tiny.oldest else {"preprocessor_config.json": processor_json(tiny)}),
        },
        tokenizer=TokenizerContents(
            special_tokens=SPECIAL_TOKENS,
            end_token=END,
            pad_token=PAD,
            chat_template=CHAT_TEMPLATE,
            max_length=4096,
        ),
        tensors={
            **{f"vpm.{name}": tensor for name, tensor in tower.items()},
            **{f"resampler.{name}": tensor for name, tensor in resampler_tensors(tiny).items()},
            **(
                {f"llm.{name}": tensor for name, tensor in decoder_tensors(tiny).items()}
                if tiny.with_decoder
                else {}
            ),
            **(other_parts() if tiny.other_parts else {}),
        },
        dtype=tiny.dtype,
    )


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


def later_tower(tiny: Tiny) -> Mapping[str, RandomTensor]:
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
            found |= linear(f"{layer}.self_attn.{name}", width, width, doubled=name[0] in "qk")
        found |= linear(f"{layer}.mlp.fc1", tiny.inner, width) | linear(f"{layer}.mlp.fc2", width, tiny.inner)
    return found


def oldest_tower(tiny: Tiny) -> Mapping[str, RandomTensor]:
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
        found |= {
            f"{block}.attn.qkv.weight": random_weight(3 * width, width, doubled_rows=2 * width),
            f"{block}.attn.qkv.bias": random_bias(3 * width, doubled_rows=2 * width),
        }
        found |= linear(f"{block}.attn.proj", width, width)
        found |= linear(f"{block}.mlp.fc1", tiny.inner, width) | linear(f"{block}.mlp.fc2", width, tiny.inner)
    return found


def resampler_tensors(tiny: Tiny) -> Mapping[str, RandomTensor]:
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


def other_parts() -> Mapping[str, RandomTensor]:
    names = ("vpm.head.probe", "apm.conv1.weight", "audio_projection_layer.linear1.weight", "tts.emb.weight")
    return {name: random_weight(4, 4) for name in names}


def decoder_tensors(tiny: Tiny) -> Mapping[str, RandomTensor]:
    """Return a decoder under Llama's names; 2.6 has Qwen2's biases too, 4.5 the head norms of Qwen3."""
    width, inner = tiny.out, TEXT_INNER
    keys = width // TEXT_HEADS * TEXT_KV_HEADS
    found = {
        "model.embed_tokens.weight": random_weight(VOCAB_SIZE, width),
        "model.norm.weight": random_scale(width),
        "lm_head.weight": random_weight(VOCAB_SIZE, width),
    }
    for index in range(TEXT_LAYERS):
        layer = f"model.layers.{index}"
        for name, rows in (("q", width), ("k", keys), ("v", keys)):
            doubled = rows if name in "qk" else 0
            found[f"{layer}.self_attn.{name}_proj.weight"] = random_weight(rows, width, doubled_rows=doubled)
            if tiny.version == "2.6":
                found[f"{layer}.self_attn.{name}_proj.bias"] = random_bias(rows, doubled_rows=doubled)
        if tiny.version == "4.5":
            for name in ("q_norm", "k_norm"):
                found[f"{layer}.self_attn.{name}.weight"] = random_scale(width // TEXT_HEADS)
        found |= {
            f"{layer}.input_layernorm.weight": random_scale(width),
            f"{layer}.post_attention_layernorm.weight": random_scale(width),
            f"{layer}.self_attn.o_proj.weight": random_weight(width, width),
            f"{layer}.mlp.gate_proj.weight": random_weight(inner, width),
            f"{layer}.mlp.up_proj.weight": random_weight(inner, width),
            f"{layer}.mlp.down_proj.weight": random_weight(width, inner),
        }
    return found


def norm(name: str, width: int) -> dict[str, RandomTensor]:
    return {f"{name}.weight": random_scale(width), f"{name}.bias": random_bias(width)}


def linear(name: str, rows: int, columns: int, *, doubled: bool = False) -> dict[str, RandomTensor]:
    count = rows if doubled else 0
    return {
        f"{name}.weight": random_weight(rows, columns, doubled_rows=count),
        f"{name}.bias": random_bias(rows, doubled_rows=count),
    }


def table(*shape: int) -> RandomTensor:
    """Return queries and their places, as large as what they are added to."""
    return RandomTensor(shape=shape, std=1.0)


def places(*shape: int) -> RandomTensor:
    """Return positions of the tower; larger ones hide the epsilon of the first norm when pixels are faint."""
    return RandomTensor(shape=shape, std=0.2)
