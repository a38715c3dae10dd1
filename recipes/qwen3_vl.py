"""Qwen3-VL: attention inside frames, a position table resized to each frame, levels between the blocks.

M merged cells, N patches, C width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

from torch import Tensor, nn

from vlexport.checkpoint import MAX_LAYERS, Checkpoint
from vlexport.errors import InputError
from vlexport.recipe import LanguageRule, Limit, PromptItem, PromptRule, Recipe, own_text_model
from vlexport.vision import grid
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.attention.packing import Structure
from vlexport.vision.blocks import Block, FusedAttention, GeluMlp, LayerNorm, PatchEmbed, PatchMerger
from vlexport.vision.grid_tower import GridConfig, GridPacking, GridTower
from vlexport.vision.packed_reference import PackedReference, packed_reference
from vlexport.vision.position_tables import rows_between
from vlexport.vision.preprocess import HALVES, by_volume, patch_rule, to_patches

# transformers builds every norm of this tower with this constant.
NORM_EPS = 1e-6
PREFIXES = ("model.visual.", "visual.")
# Parts of names in the tower, and what checkpoints call them.
STORED = {"ln_q": "norm", "mlp.0": "linear_fc1", "mlp.2": "linear_fc2", "mlp.fc": "mlp.linear_fc"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(GridConfig):
    """The numbers of config.json and preprocessor_config.json that shape graph and inputs.

    table_side    rows and columns of the position table
    level_blocks  the blocks after which a level leaves the tower
    """

    table_side: int
    level_blocks: tuple[int, ...]
    rope_theta: float

    @property
    def levels(self) -> dict[str, int]:
        return {f"level_{at}": block for at, block in enumerate(self.level_blocks)}

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Config:
        vision = checkpoint.view.section("vision_config")
        activation = vision.get_str("hidden_act", "gelu_pytorch_tanh")
        if activation != "gelu_pytorch_tanh":
            vision.refuse("hidden_act", activation, "'gelu_pytorch_tanh'")
        vision.require_divisor("num_heads", "hidden_size", even=True)
        depth = vision.require_size("depth", MAX_LAYERS)
        levels = vision.get_ints("deepstack_visual_indexes", (8, 16, 24))
        if sorted(set(levels)) != list(levels) or any(not 0 <= block < depth for block in levels):
            vision.refuse("deepstack_visual_indexes", levels, f"ascending numbers of the {depth} blocks")
        places = vision.get_size("num_position_embeddings", 2304)
        if math.isqrt(places) ** 2 != places:
            vision.refuse("num_position_embeddings", places, "a square number")
        images, videos = checkpoint.image_processor().values, checkpoint.video_processor().values
        rule = patch_rule(
            images,
            {**HALVES, **videos},
            patch=vision.get_size("patch_size", 16, 1024),
            merge=vision.get_size("spatial_merge_size", 2, 1024),
            temporal=vision.get_size("temporal_patch_size", 2, 1024),
        )
        return cls(
            depth=depth,
            width=vision.require_size("hidden_size"),
            heads=vision.require_size("num_heads"),
            inner=vision.require_size("intermediate_size"),
            out_width=vision.require_size("out_hidden_size"),
            table_side=math.isqrt(places),
            level_blocks=tuple(levels),
            rope_theta=vision.rope().get_float("rope_theta", 10000.0),
            rule=by_volume(rule, videos),
        )


class TablePacking(GridPacking):
    """Whole frames of merged cells; every patch also has the sides of its frame."""

    per_patch = ("positions", "sides")

    def __init__(self, config: Config) -> None:
        super().__init__(config.rule, further=config.levels)

    def row_tables(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        sides_N2 = grid.patch_sides(structure["grids"], self.merge)
        return {**super().row_tables(structure, order_M), "sides": sides_N2}


class Tower(GridTower):
    """The vision tower with its mergers."""

    connectors = ("merger", "deepstack_merger_list")

    def __init__(self, config: Config) -> None:
        super().__init__(
            TablePacking(config),
            [block(config) for _ in range(config.depth)],
            merger(config, norm_joined=False),
            head_dim=config.width // config.heads,
            theta=config.rope_theta,
        )
        rule = config.rule
        self.patch_embed = PatchEmbed((3, rule.temporal, rule.patch, rule.patch), config.width, bias=True)
        self.levels, self.side = config.levels, config.table_side
        self.pos_embed = nn.Embedding(config.table_side**2, config.width)
        self.deepstack_merger_list = nn.ModuleList(merger(config, norm_joined=True) for _ in self.levels)

    def embed(self, inputs: Mapping[str, Tensor]) -> Tensor:
        rows_NC = super().embed(inputs)
        return rows_NC + self.places(inputs["positions"], inputs["sides"]).to(rows_NC.dtype)

    def places(self, positions_N2: Tensor, sides_N2: Tensor) -> Tensor:
        """Resize the table to the frame of each patch, bilinear with aligned corners, in float32."""
        at_N2 = positions_N2.float() * (self.side - 1) / (sides_N2 - 1).clamp(min=1).float()
        return rows_between(self.pos_embed.weight, self.side, at_N2)

    def level(self, name: str, x: Tensor, layout: CallLayout) -> Tensor:
        merge = self.deepstack_merger_list[list(self.levels).index(name)]
        rows: Tensor = merge(x).index_select(0, layout.inverse_M)
        return rows


def merger(config: Config, *, norm_joined: bool) -> PatchMerger:
    unit = config.rule.merge**2
    norm = LayerNorm(config.width * (unit if norm_joined else 1), eps=NORM_EPS)
    return PatchMerger(norm, config.width, unit, config.out_width, norm_joined=norm_joined)


def block(config: Config) -> Block:
    return Block(
        "frame",
        norms=[LayerNorm(config.width, eps=NORM_EPS) for _ in range(2)],
        attention=FusedAttention(config.width, config.heads),
        mlp=GeluMlp(config.width, config.inner, exact=False),
    )


def stored_names(
    checkpoint: Checkpoint, config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, str]:
    ours = {reduce(lambda stored, pair: stored.replace(*pair), STORED.items(), name): name for name in shapes}
    expected = {stored: shapes[name] for stored, name in ours.items()}
    resolved = checkpoint.check_names(expected, checkpoint.resolve_prefix(PREFIXES))
    return {ours[stored]: where for stored, where in resolved.items()}


def reference(checkpoint: Checkpoint) -> PackedReference:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    return packed_reference(
        Qwen3VLVisionConfig,
        Qwen3VLVisionModel,
        dict(checkpoint.view.section("vision_config").items()),
        lambda module: checkpoint.load_into(module, prefixes=PREFIXES, dtype="float32"),
    )


IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
SLOTS = {"image": IMAGE, "video": VIDEO}


def expand(config: Config, item: PromptItem) -> str:
    """Write an image as its tokens, a video as the time and the tokens of one frame after the other."""
    if item.kind == "image":
        return IMAGE * item.num_rows
    seconds = item.item.frame_seconds
    if len(seconds) != item.item.grid[0]:
        raise InputError(
            f"video {item.number}: times of {len(seconds)} frames given, {item.item.grid[0]} expected: its "
            "prompt contains the time of each. Pass the frame rate as fps."
        )
    frames = zip(seconds, item.frame_rows, strict=True)
    return "".join(f"<{at:.1f} seconds>{START}{VIDEO * rows}{END}" for at, rows in frames)


PROMPT: PromptRule[Config] = PromptRule(markers=SLOTS, slots=SLOTS, expand=expand, apart=True)
# Up to transformers 5.9 the markers round a video in the chat template are replaced too.
BARE = replace(PROMPT, markers={"image": IMAGE, "video": f"{START}{VIDEO}{END}"})
LANGUAGE: LanguageRule[Config] = LanguageRule(
    build=own_text_model,
    prefixes=("model.language_model.", "language_model.model."),
    heads=("lm_head.weight",),
    prompt=PROMPT,
    layouts={"bare": BARE},
    frame_markers=(START, END),
    levels=True,
    transposed=(".experts.gate_up_proj", ".experts.down_proj"),
)
ORIGIN = "ours and transformers differ by 4.3e-6, one token by 8.3e-6, on two tiny towers of depth 4 and 8"
BFLOAT16_ORIGIN = "transformers' own bfloat16 is off by 0.062, one token by 0.093, with 27 blocks"
FLOAT16_ORIGIN = "transformers' own float16 is off by 0.0076, one token by 0.013, with 27 blocks"

RECIPE = Recipe(
    name="qwen3_vl",
    summary="Qwen3-VL dense and MoE: attention inside frames, tokens, and levels for the decoder",
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    config=Config,
    packing=TablePacking,
    modules=Tower,
    stored_names=stored_names,
    preprocess=lambda config, pixels: to_patches(config.rule, pixels),
    reference=reference,
    position_rule="time_as_text",
    pruning_rule="evs",
    language=LANGUAGE,
    limits={
        "float32": Limit(relative_l2=1e-5, worst_token=5e-5, origin=ORIGIN),
        "bfloat16": Limit(relative_l2=0.09, worst_token=0.15, origin=BFLOAT16_ORIGIN),
        "float16": Limit(relative_l2=0.01, worst_token=0.018, origin=FLOAT16_ORIGIN),
    },
)
