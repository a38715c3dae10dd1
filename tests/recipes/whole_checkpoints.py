"""Tiny checkpoints of whole models of transformers: weights, tokenizer, chat template and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.classes import PIXELS, random_state

TOKENIZER = Path(__file__).parents[1] / "golden" / "e2e" / "checkpoint"
TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 640, "max_position_embeddings": 4096,
}  # fmt: skip
PLACED = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
VIT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
GRID = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 48}
PADS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
SIDE = {"height": 32, "width": 32}
TILES = [[32, 32], [32, 64], [64, 32], [64, 64]]
CELLS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
# Settings of the model, special tokens, what a picture is in a chat, processor of pictures, of both.
WHOLE: dict[str, tuple[dict[str, Any], dict[str, str], str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"vision_config": VIT, "text_config": TEXT, "mm_tokens_per_image": 4},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": SIDE},
        {"image_seq_length": 4},
    ),
    "internvl": (
        {
            "vision_config": {**VIT, "image_size": [32, 32], "patch_size": [8, 8]},
            "text_config": {"model_type": "qwen2", **TEXT},
        },
        {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": SIDE, "max_patches": 4},
        {"image_seq_length": 4},
    ),
    "llava_onevision": (
        {
            "vision_config": {**VIT, "model_type": "siglip_vision_model"},
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_grid_pinpoints": TILES,
        },
        {"image_token": "<image>", "video_token": "<video>"},
        "<image>",
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SIDE, "image_grid_pinpoints": TILES},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_5_vl": (
        {"vision_config": {**GRID, "fullatt_block_indexes": [1]}, "text_config": PLACED},
        PADS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_processor_type": "Qwen2VLImageProcessor", **CELLS,
            "size": {"shortest_edge": 3136, "longest_edge": 50176},
        },
        {},
    ),
    "qwen3_vl": (
        {
            "vision_config": {**GRID, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            "text_config": PLACED,
        },
        PADS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_processor_type": "Qwen2VLImageProcessor", **CELLS, "patch_size": 16,
            "size": {"shortest_edge": 4096, "longest_edge": 65536},
        },
        {},
    ),
    "glm4v": (
        {"vision_config": {**GRID, "image_size": 84}, "text_config": PLACED},
        {
            "image_token": "<|image|>", "video_token": "<|video|>",
            "image_start_token": "<|begin_of_image|>", "image_end_token": "<|end_of_image|>",
        },
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "image_processor_type": "Glm4vImageProcessor", **CELLS,
            "size": {"shortest_edge": 3136, "longest_edge": 100352},
        },
        {},
    ),
}  # fmt: skip
# What a video is in a chat, processor of videos.
CLIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "internvl": ("<video>", {"video_processor_type": "InternVLVideoProcessor", "size": SIDE}),
    "llava_onevision": ("<video>", {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SIDE}),
    "qwen2_5_vl": (
        "<|vision_start|><|video_pad|><|vision_end|>",
        {
            "video_processor_type": "Qwen2VLVideoProcessor", **CELLS,
            "size": {"shortest_edge": 3136, "longest_edge": 50176},
        },
    ),
    "qwen3_vl": (
        "<|vision_start|><|video_pad|><|vision_end|>",
        {
            "video_processor_type": "Qwen3VLVideoProcessor", **CELLS, "patch_size": 16,
            "size": {"shortest_edge": 4096, "longest_edge": 262144},
        },
    ),
}  # fmt: skip
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PICTURE"
    "{% elif part['type'] == 'video' %}CLIP{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_whole(model_type: str, folder: Path) -> Path:
    """Write a checkpoint as its publisher would: what transformers loads from it is the oracle."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    settings, tokens, picture, pixels, both = WHOLE[model_type]
    clip, frames = CLIPS.get(model_type, ("", {}))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, extra_special_tokens=tokens)
    tokenizer.chat_template = CHAT.replace("PICTURE", picture).replace("CLIP", clip)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    image = ids.get("image_token", ids.get("context_image_token"))
    named = {
        "image_token_id": image, "image_token_index": image,
        "video_token_id": ids.get("video_token"), "video_token_index": ids.get("video_token"),
        "image_start_token_id": ids.get("image_start_token"),
        "image_end_token_id": ids.get("image_end_token"),
        "boi_token_index": ids.get("boi_token"), "eoi_token_index": ids.get("eoi_token"),
    }  # fmt: skip
    kind: Any = type(AutoConfig.for_model(model_type))
    config = kind(**settings, **{name: number for name, number in named.items() if number is not None})
    model = AutoModelForImageTextToText.from_config(config)
    model.load_state_dict({**model.state_dict(), **random_state(model)})
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PIXELS, **pixels}))
    if frames:
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**PIXELS, **frames}))
    if both:
        (folder / "processor_config.json").write_text(json.dumps(both))
    return folder


def photographs() -> list[Image.Image]:
    """Return smooth pictures of three sizes, so that processors make different numbers of tiles and rows."""
    generator = np.random.default_rng(0)
    sizes = ((120, 90), (40, 40), (200, 64))
    return [
        Image.fromarray(generator.integers(0, 255, (6, 8, 3), dtype=np.uint8)).resize(size) for size in sizes
    ]
