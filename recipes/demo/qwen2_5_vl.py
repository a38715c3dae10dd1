"""Contents of a random Qwen2.5-VL checkpoint, tiny or of a released size: config, files, tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlexport.recipes.demo import END, PAD, VOCAB_SIZE, Tensors, checkpoint_of, decoder_layer, linear

from vlexport.checkpoint import (
    CheckpointContents,
    TokenizerContents,
    random_scale,
    random_weight,
    special_token_id,
)

SPECIAL_TOKENS = (
    PAD, "<|im_start|>", END,
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
EACH = "{%- for message in messages -%}\n"
SYSTEM = """\
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
"""
TURNS = """\
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
CHAT_TEMPLATE = EACH + SYSTEM + TURNS


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Sizes of the language model; a tied one has no output layer of its own."""

    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    layers: int = 2
    inner: int = 128
    vocabulary: int = VOCAB_SIZE
    max_tokens: int = 4096
    tied: bool = False

    @property
    def sections(self) -> list[int]:
        """The way that half of a head is shared between time, rows and columns: 2, 3, 3 of 8."""
        half = self.width // self.heads // 2
        return [half // 4, 3 * half // 8, 3 * half // 8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny:
    """Sizes and spelling: `naming` is the tower's prefix, `config_style` is `flat` (older) or `nested`.

    `out` other than the width of `text` needs `with_decoder=False`. `branch_gain` is of what blocks add: at
    1/sqrt(2 * depth), as models are initialised, deep towers do not multiply rounding errors.
    """

    depth: int = 4
    hidden: int = 64
    heads: int = 4
    inner: int = 128
    out: int = 64
    naming: str = "visual."
    config_style: str = "nested"
    dtype: str = "float32"
    with_decoder: bool = True
    branch_gain: float = 1.0
    text: Text = Text()


DEFAULT = Tiny()
# The numbers of the released model of three billion weights.
THREE_BILLION = Tiny(
    depth=32, hidden=1280, heads=16, inner=3420, out=2048, dtype="bfloat16",
    text=Text(
        width=2048, heads=16, kv_heads=2, layers=36, inner=11008,
        vocabulary=151936, max_tokens=128000, tied=True,
    ),
)  # fmt: skip
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 16, 20), (-1.7777, 0.9088, -0.4014, 0.1931, 0.7808, 1.2044, -1.5879))
# Planted bugs are judged on these.
TRIALS = {"windows": Tiny(depth=2), "deep": Tiny(depth=12)}


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    """Return what the demo writes, or a test with other sizes."""
    naming = tiny.naming
    tower = {naming + name: replace(tensor, stream=name) for name, tensor in tower_tensors(tiny).items()}
    decoder = decoder_tensors(naming, tiny.text) if tiny.with_decoder else {}
    made: CheckpointContents = checkpoint_of(
        config_json(tiny),
        {
            "preprocessor_config.json": processor_json("image"),
            "video_preprocessor_config.json": processor_json("video"),
        },
        TokenizerContents(
            special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE, max_length=tiny.text.max_tokens
        ),
        {**tower, **decoder},
        tiny.dtype,
    )
    return made


def token(text: str) -> int:
    return special_token_id(SPECIAL_TOKENS, text)


def config_json(tiny: Tiny) -> dict[str, object]:
    shared: dict[str, object] = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "tie_word_embeddings": tiny.text.tied,
    }
    section = tiny.text.sections
    if tiny.config_style == "flat":
        rope: dict[str, object] = {
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": section},
            "torch_dtype": tiny.dtype,
        }
        return {**shared, **text_json(tiny.text), **rope, "vision_config": vision_json(tiny)}
    parameters = {"rope_theta": 1000000.0, "rope_type": "default", "mrope_section": section}
    nested = {**text_json(tiny.text), "model_type": "qwen2_5_vl_text", "rope_parameters": parameters}
    return {**shared, "dtype": tiny.dtype, "text_config": nested, "vision_config": vision_json(tiny)}


def text_json(text: Text) -> dict[str, object]:
    return {
        "attention_dropout": 0.0,
        "bos_token_id": token(PAD),
        "eos_token_id": token(END),
        "pad_token_id": token(PAD),
        "hidden_act": "silu",
        "hidden_size": text.width,
        "intermediate_size": text.inner,
        "max_position_embeddings": text.max_tokens,
        "max_window_layers": text.layers,
        "num_attention_heads": text.heads,
        "num_hidden_layers": text.layers,
        "num_key_value_heads": text.kv_heads,
        "rms_norm_eps": 1e-06,
        "sliding_window": text.max_tokens,
        "tie_word_embeddings": text.tied,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": text.vocabulary,
    }


def vision_json(tiny: Tiny) -> dict[str, object]:
    # Full attention in every fourth part of the depth, as in the released models (7, 15, 23, 31 of 32).
    step = max(2, tiny.depth // 4)
    common: dict[str, object] = {
        "depth": tiny.depth,
        "hidden_act": "silu",
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.inner,
        "num_heads": tiny.heads,
        "out_hidden_size": tiny.out,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": list(range(step - 1, tiny.depth, step)) or [tiny.depth - 1],
    }
    if tiny.config_style == "flat":
        return {**common, "in_chans": 3, "spatial_patch_size": 14}
    rope = {"rope_theta": 10000.0, "rope_type": "axial"}
    return {**common, "in_channels": 3, "model_type": "qwen2_5_vl_vision", "rope_parameters": rope}


def processor_json(kind: str) -> dict[str, object]:
    common: dict[str, object] = {
        "processor_class": "Qwen2_5_VLProcessor",
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28},
    }
    if kind == "image":
        return {**common, "image_processor_type": "Qwen2VLImageProcessor"}
    frames = {"do_sample_frames": False, "min_frames": 4, "max_frames": 768, "fps": 2}
    return {**common, **frames, "video_processor_type": "Qwen2VLVideoProcessor"}


def tower_tensors(tiny: Tiny) -> Tensors:
    """Return vision tower and merger, names without prefix; query and key rows doubled."""
    hidden, inner, wide = tiny.hidden, tiny.inner, 4 * tiny.hidden
    found = {
        "patch_embed.proj.weight": random_weight(hidden, 3, 2, 14, 14),
        "merger.ln_q.weight": random_scale(hidden),
        **linear("merger.mlp.0", wide, wide),
        **linear("merger.mlp.2", tiny.out, wide),
    }
    block = {
        "norm1.weight": random_scale(hidden),
        "norm2.weight": random_scale(hidden),
        **linear("attn.qkv", 3 * hidden, hidden, doubled=2 * hidden),
        **linear("attn.proj", hidden, hidden, gain=tiny.branch_gain),
        **linear("mlp.gate_proj", inner, hidden),
        **linear("mlp.up_proj", inner, hidden),
        **linear("mlp.down_proj", hidden, inner, gain=tiny.branch_gain),
    }
    for index in range(tiny.depth):
        found |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    return found


def decoder_tensors(naming: str, text: Text) -> Tensors:
    """Return the language model, under the names that go with the tower's prefix."""
    table = random_weight(text.vocabulary, text.width)
    found = {"embed_tokens.weight": table, "norm.weight": random_scale(text.width)}
    layer = decoder_layer(text.width, text.width // text.heads * text.kv_heads, text.inner, biases=True)
    for index in range(text.layers):
        found |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    prefix = "model." if naming == "visual." else "model.language_model."
    named = {prefix + name: replace(tensor, stream=f"decoder.{name}") for name, tensor in found.items()}
    return named if text.tied else {**named, "lm_head.weight": table}
