"""Qwen2.5-VL: windowed vision tower, 2x2 merger.   M merged cells, I items."""

from __future__ import annotations

from dataclasses import dataclass

from vlexport.checkpoint import MAX_LAYERS, Checkpoint
from vlexport.recipe import LanguageRule, Limit, PromptRule, Recipe, own_text_model
from vlexport.vision.blocks import Block, FusedAttention, PatchMerger, RMSNorm, SwiGLU
from vlexport.vision.grid_tower import GridConfig, GridPacking, GridTower
from vlexport.vision.packed_reference import PackedReference, packed_reference
from vlexport.vision.preprocess import patch_rule, to_patches

# transformers builds every norm of this tower with this constant, whatever the text config gives.
NORM_EPS = 1e-6
PREFIXES = ("visual.", "model.visual.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(GridConfig):
    """The numbers of config.json and preprocessor_config.json that shape graph and inputs."""

    window_size: int
    full_blocks: tuple[int, ...]
    rope_theta: float
    tokens_per_second: float

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Config:
        vision = checkpoint.view.section("vision_config")
        activation = vision.get_str("hidden_act", "silu")
        if activation != "silu":
            vision.refuse("hidden_act", activation, "'silu'")
        merge, patch = vision.get_size("spatial_merge_size", 2, 1024), vision.get_size("patch_size", 14, 1024)
        window = vision.get_size("window_size", 112)
        if window < merge * patch:
            vision.refuse("window_size", window, f"at least one merged cell of {merge * patch} pixels")
        vision.require_divisor("num_heads", "hidden_size", even=True)
        return cls(
            depth=vision.require_size("depth", MAX_LAYERS),
            width=vision.require_size("hidden_size"),
            heads=vision.require_size("num_heads"),
            inner=vision.require_size("intermediate_size"),
            out_width=vision.require_size("out_hidden_size"),
            window_size=window,
            full_blocks=vision.get_ints("fullatt_block_indexes", (7, 15, 23, 31)),
            rope_theta=vision.rope().get_float("rope_theta", 10000.0),
            tokens_per_second=vision.get_float("tokens_per_second", 4.0),
            rule=patch_rule(
                checkpoint.image_processor().values,
                checkpoint.video_processor().values,
                patch=patch,
                merge=merge,
                temporal=vision.get_size("temporal_patch_size", 2, 1024),
            ),
        )


def packing(config: Config) -> GridPacking:
    rule = config.rule
    return GridPacking(rule, window_side=config.window_size // rule.merge // rule.patch)


class Tower(GridTower):
    """The vision tower with its merger."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            packing(config),
            [block(config, index) for index in range(config.depth)],
            PatchMerger(
                RMSNorm(config.width, NORM_EPS), config.width, config.rule.merge**2, config.out_width
            ),
            head_dim=config.width // config.heads,
            theta=config.rope_theta,
        )


def block(config: Config, index: int) -> Block:
    return Block(
        "frame" if index in config.full_blocks else "window",
        norms=(RMSNorm(config.width, NORM_EPS), RMSNorm(config.width, NORM_EPS)),
        attention=FusedAttention(config.width, config.heads),
        mlp=SwiGLU(config.width, config.inner),
    )


def reference(checkpoint: Checkpoint) -> PackedReference:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    return packed_reference(
        Qwen2_5_VLVisionConfig,
        Qwen2_5_VisionTransformerPretrainedModel,
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
    tokens_per_second=lambda config: config.tokens_per_second,
)
ORIGIN = "parity.md 5: fp32 starting gate; ours and transformers differ by 5e-6 on towers of depth 8 and less"
BFLOAT16_ORIGIN = "transformers' own bfloat16 is off by 0.09, one token by 0.12, on the faintest sample"
FLOAT16_ORIGIN = "an eighth of bfloat16's; transformers' own float16 is off by 0.006, one token by 0.009"

RECIPE = Recipe(
    name="qwen2_5_vl",
    summary="Qwen2.5-VL 3B, 7B, 32B, 72B: windowed tower and merger, images and videos in one engine",
    model_types=("qwen2_5_vl",),
    config=Config,
    packing=packing,
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
        "bfloat16": Limit(relative_l2=0.15, worst_token=0.3, origin=BFLOAT16_ORIGIN),
        "float16": Limit(relative_l2=0.02, worst_token=0.04, origin=FLOAT16_ORIGIN),
    },
)
