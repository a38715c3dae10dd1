"""Qwen2-VL: every block attends inside whole frames; LayerNorm, quick GELU, 2x2 merger."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlexport.checkpoint import MAX_LAYERS, Checkpoint
from vlexport.recipe import LanguageRule, Limit, PromptRule, Recipe, own_text_model
from vlexport.vision.blocks import Block, FusedAttention, LayerNorm, PatchMerger
from vlexport.vision.grid_tower import GridConfig, GridPacking, GridTower
from vlexport.vision.packed_reference import PackedReference, packed_reference
from vlexport.vision.preprocess import patch_rule, to_patches

# transformers builds every norm of this tower with this constant.
NORM_EPS = 1e-6
PREFIXES = ("visual.", "model.visual.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(GridConfig):
    """The numbers of config.json and preprocessor_config.json that shape graph and inputs."""

    rope_theta: float

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Config:
        vision = checkpoint.view.section("vision_config")
        activation = vision.get_str("hidden_act", "quick_gelu")
        if activation != "quick_gelu":
            vision.refuse("hidden_act", activation, "'quick_gelu'")
        vision.require_divisor("num_heads", "embed_dim", even=True)
        width = vision.require_size("embed_dim")
        return cls(
            depth=vision.require_size("depth", MAX_LAYERS),
            width=width,
            heads=vision.require_size("num_heads"),
            inner=int(width * vision.get_float("mlp_ratio", 4.0)),
            out_width=vision.require_size("hidden_size"),
            rope_theta=vision.rope().get_float("rope_theta", 10000.0),
            rule=patch_rule(
                checkpoint.image_processor().values,
                checkpoint.video_processor().values,
                patch=vision.get_size("patch_size", 14, 1024),
                merge=vision.get_size("spatial_merge_size", 2, 1024),
                temporal=vision.get_size("temporal_patch_size", 2, 1024),
            ),
        )


class QuickGeluMlp(nn.Module):
    """Two linear layers around `x * sigmoid(1.702 x)`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x_NC: Tensor) -> Tensor:
        hidden = self.fc1(x_NC)
        out: Tensor = self.fc2(hidden * torch.sigmoid(1.702 * hidden))
        return out


class Tower(GridTower):
    """The vision tower with its merger."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            GridPacking(config.rule),
            [block(config) for _ in range(config.depth)],
            PatchMerger(
                LayerNorm(config.width, eps=NORM_EPS), config.width, config.rule.merge**2, config.out_width
            ),
            head_dim=config.width // config.heads,
            theta=config.rope_theta,
        )


def block(config: Config) -> Block:
    return Block(
        "frame",
        norms=[LayerNorm(config.width, eps=NORM_EPS) for _ in range(2)],
        attention=FusedAttention(config.width, config.heads),
        mlp=QuickGeluMlp(config.width, config.inner),
    )


def reference(checkpoint: Checkpoint) -> PackedReference:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    return packed_reference(
        Qwen2VLVisionConfig,
        Qwen2VisionTransformerPretrainedModel,
        dict(checkpoint.view.section("vision_config").items()),
        lambda module: checkpoint.load_into(module, prefixes=PREFIXES, dtype="float32"),
    )


SLOTS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
LANGUAGE: LanguageRule[Config] = LanguageRule(
    build=own_text_model,
    prefixes=("model.language_model.", "model."),
    heads=("lm_head.weight",),
    prompt=PromptRule(
        markers=SLOTS, slots=SLOTS, expand=lambda config, item: SLOTS[item.kind] * item.num_rows
    ),
    counts_frames=True,
)
ORIGIN = "ours and transformers differ by 6.5e-6, one token by 1.3e-5, on faint mixes of two tiny towers"
BFLOAT16_ORIGIN = "twice transformers' own bfloat16: off by 0.051, one token by 0.12, on faint mixes"
FLOAT16_ORIGIN = "an eighth of bfloat16's; transformers' own float16 is off by 0.0063, one token by 0.012"

RECIPE = Recipe(
    name="qwen2_vl",
    summary="Qwen2-VL 2B, 7B, 72B: attention inside frames, images and videos in one engine",
    model_types=("qwen2_vl",),
    config=Config,
    packing=lambda config: GridPacking(config.rule),
    modules=Tower,
    stored_names=lambda checkpoint, _, shapes: checkpoint.check_names(
        shapes, checkpoint.resolve_prefix(PREFIXES)
    ),
    preprocess=lambda config, pixels: to_patches(config.rule, pixels),
    reference=reference,
    position_rule="time_scaled",
    pruning_rule="evs",
    language=LANGUAGE,
    limits={
        "float32": Limit(relative_l2=1e-5, worst_token=5e-5, origin=ORIGIN),
        "bfloat16": Limit(relative_l2=0.1, worst_token=0.25, origin=BFLOAT16_ORIGIN),
        "float16": Limit(relative_l2=0.0125, worst_token=0.03, origin=FLOAT16_ORIGIN),
    },
)
