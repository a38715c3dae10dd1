"""Contents of a random Qwen2.5-VL checkpoint, tiny or of a chosen size: config, files, tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vlexport.recipes.demo import parts
from vlexport.recipes.demo.parts import CLIP_MEAN, CLIP_STD, END, PAD, Json, Tensors, Text, Tree
from vlexport.recipes.demo.writing import CheckpointContents, TokenizerContents

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
TOKENIZER = TokenizerContents(special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE)
token = TOKENIZER.token_id
PLACEHOLDERS = {
    "image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>"),
    "vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny:
    """Sizes; `naming` is the tower's prefix, `out` other than the width of `text` needs `with_decoder=False`.

    `branch_gain` is of what blocks add: at 1/sqrt(2 * depth), as models are initialised, deep towers do not
    multiply rounding errors.
    """

    depth: int = 4
    hidden: int = 64
    heads: int = 4
    inner: int = 128
    out: int = 64
    naming: str = "visual."
    dtype: str = "float32"
    with_decoder: bool = True
    branch_gain: float = 1.0
    text: Text = field(default_factory=Text)


DEFAULT = Tiny()
# Grid and seven values that preprocessing gives for the picture of `doctor --deep`, measured on x86-64.
PIXELS = ((1, 16, 20), (-1.7777, 0.9088, -0.4014, 0.1931, 0.7808, 1.2044, -1.5879))


def contents(tiny: Tiny = DEFAULT) -> CheckpointContents:
    files = {
        "preprocessor_config.json": processor_json("image"),
        "video_preprocessor_config.json": processor_json("video"),
    }
    tokenizer = replace(TOKENIZER, max_length=tiny.text.max_tokens)
    tensors = tensors_of(tiny, tower(tiny), parts.decoder_layer(tiny.text, biases=True))
    return parts.checkpoint_of(config_json(tiny), files, tokenizer, tensors)


def tensors_of(tiny: Tiny, tower: Tree, layer: Tree) -> Tensors:
    """Return tower and decoder, under the names that go with the tower's prefix."""
    names: Tensors = parts.named(tower, tiny.naming, stream="")
    if not tiny.with_decoder:
        return names
    prefix = "model." if tiny.naming == "visual." else "model.language_model."
    names |= parts.named(parts.decoder(tiny.text, [layer] * tiny.text.layers), prefix, stream="decoder.")
    head = {} if tiny.text.tied else {"lm_head.weight": parts.weight(tiny.text.vocabulary, tiny.text.width)}
    return names | parts.named(head)


def config_json(tiny: Tiny) -> Json:
    half = tiny.text.head // 2
    text = {
        **parts.text_json(tiny.text, TOKENIZER),
        "model_type": "qwen2_5_vl_text", "attention_dropout": 0.0, "use_cache": True,
        "max_window_layers": tiny.text.layers, "sliding_window": tiny.text.max_tokens,
        "use_sliding_window": False,
        # Half of a head is shared between time, rows and columns: 2, 3, 3 of 8.
        "rope_parameters": {
            "rope_theta": 1000000.0, "rope_type": "default",
            "mrope_section": [half // 4, 3 * half // 8, 3 * half // 8],
        },
    }  # fmt: skip
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        **PLACEHOLDERS, "tie_word_embeddings": tiny.text.tied, "dtype": tiny.dtype,
        "text_config": text, "vision_config": vision_json(tiny),
    }  # fmt: skip


def vision_json(tiny: Tiny) -> Json:
    # Full attention in every fourth part of the depth, as in the released models (7, 15, 23, 31 of 32).
    step = max(2, tiny.depth // 4)
    return {
        "model_type": "qwen2_5_vl_vision", "depth": tiny.depth, "num_heads": tiny.heads,
        "hidden_size": tiny.hidden, "intermediate_size": tiny.inner, "out_hidden_size": tiny.out,
        "hidden_act": "silu", "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 112,
        "fullatt_block_indexes": list(range(step - 1, tiny.depth, step)) or [tiny.depth - 1],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
    }  # fmt: skip


def processor_json(kind: str) -> Json:
    common = {
        "processor_class": "Qwen2_5_VLProcessor", "do_convert_rgb": True,
        "do_resize": True, "resample": 3, "size": {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28},
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
        "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    }  # fmt: skip
    if kind == "image":
        return {**common, "image_processor_type": "Qwen2VLImageProcessor"}
    frames = {"do_sample_frames": False, "min_frames": 4, "max_frames": 768, "fps": 2}
    return {**common, **frames, "video_processor_type": "Qwen2VLVideoProcessor"}


def tower(tiny: Tiny) -> Tree:
    """Return vision tower and merger; query and key rows doubled."""
    hidden, wide = tiny.hidden, 4 * tiny.hidden
    block = {
        "norm1.weight": parts.scale(hidden),
        "norm2.weight": parts.scale(hidden),
        "attn.qkv": parts.linear(3 * hidden, hidden, doubled=2 * hidden),
        "attn.proj": parts.linear(hidden, hidden, gain=tiny.branch_gain),
        "mlp.gate_proj": parts.linear(tiny.inner, hidden),
        "mlp.up_proj": parts.linear(tiny.inner, hidden),
        "mlp.down_proj": parts.linear(hidden, tiny.inner, gain=tiny.branch_gain),
    }
    return {
        "patch_embed.proj.weight": parts.weight(hidden, 3, 2, 14, 14),
        "merger.ln_q.weight": parts.scale(hidden),
        "merger.mlp": {"0": parts.linear(wide, wide), "2": parts.linear(tiny.out, wide)},
        "blocks": [block] * tiny.depth,
    }
