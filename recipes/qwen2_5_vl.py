"""Qwen2.5-VL: windowed vision tower, 2x2 merger, packed patches of any mix of images and videos.

M merged cells, N = merge^2 M patches, C width, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.language import LanguageRule, PromptRule
from vlexport.recipe import Limit, Recipe, Reference
from vlexport.specs import NAMED_BOUNDS, MediaBounds, MediaItem, Pixels, ShapeProfile
from vlexport.vision import grid, packed
from vlexport.vision.blocks import PatchEmbed, PatchMerger, RMSNorm, RotarySegmentAttention, SwiGLU
from vlexport.vision.bounds import capture_sizes
from vlexport.vision.packed import FORMS, Layout, PackedBlock, layout_of, take_cells
from vlexport.vision.preprocess import PatchRule, patch_rule, to_patches
from vlexport.vision.tower import StagedTower

# transformers builds every norm of this tower with this constant, whatever the text config says.
NORM_EPS = 1e-6
PREFIXES = ("visual.", "model.visual.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The numbers of config.json and preprocessor_config.json that shape graph and inputs."""

    depth: int
    width: int
    heads: int
    inner: int
    out_width: int
    window_size: int
    full_blocks: tuple[int, ...]
    rope_theta: float
    tokens_per_second: float
    rule: PatchRule

    @property
    def merge(self) -> int:
        return self.rule.merge

    @property
    def window_side(self) -> int:
        """Side of a window in merged cells."""
        return self.window_size // self.merge // self.rule.patch

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def parse_config(values: Mapping[str, Any]) -> Config:
    """Read back what `Config.to_json` wrote."""
    known = dict(values)
    rule = PatchRule.from_json(known.pop("rule"))
    return Config(**{**known, "full_blocks": tuple(known["full_blocks"]), "rule": rule})


def read_config(checkpoint: Checkpoint) -> Config:
    vision = checkpoint.view.section("vision_config")
    activation = vision.get_str("hidden_act", "silu")
    if activation != "silu":
        vision.refuse("hidden_act", activation, "'silu'")
    return Config(
        depth=vision.require_int("depth"),
        width=vision.require_int("hidden_size"),
        heads=vision.require_int("num_heads"),
        inner=vision.require_int("intermediate_size"),
        out_width=vision.require_int("out_hidden_size"),
        window_size=vision.get_int("window_size", 112),
        full_blocks=vision.get_ints("fullatt_block_indexes", (7, 15, 23, 31)),
        rope_theta=vision.rope().get_float("rope_theta", 10000.0),
        tokens_per_second=vision.get_float("tokens_per_second", 4.0),
        rule=patch_rule(
            checkpoint.image_processor().values,
            checkpoint.video_processor().values,
            patch=vision.get_int("patch_size", 14),
            merge=vision.get_int("spatial_merge_size", 2),
            temporal=vision.get_int("temporal_patch_size", 2),
        ),
    )


class Tower(StagedTower):
    """The vision tower with its merger; every row order is an input, so nothing depends on data."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        rule = config.rule
        self.unit = config.merge**2
        self.patch_embed = PatchEmbed((3, rule.temporal, rule.patch, rule.patch), config.width)
        self.blocks = nn.ModuleList(
            block(config, index in config.full_blocks) for index in range(config.depth)
        )
        self.merger = PatchMerger(config.width, self.unit, config.out_width, NORM_EPS)
        self.head_dim, self.theta = config.width // config.heads, config.rope_theta
        self.window_rows = config.window_side**2 * self.unit

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
        """Embed the patches and put their rows in window order."""
        layout = layout_of(inputs, self.unit, self.head_dim, self.theta, self.window_rows)
        return self.arrange(self.patch_embed(inputs["patches"]), layout), layout

    def arrange(self, x: Tensor, layout: Layout) -> Tensor:
        return take_cells(x, layout.order_M, self.unit, layout.inverse_M.shape[0])

    def restore(self, x: Tensor, layout: Layout) -> Tensor:
        return take_cells(x, layout.inverse_M, self.unit, layout.order_M.shape[0])

    def finish(self, x: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Merge cells and restore raster order."""
        return {"embeds": self.merger(x).index_select(0, layout.inverse_M)}


def block(config: Config, full: bool) -> PackedBlock:
    return PackedBlock(
        norms=(RMSNorm(config.width, NORM_EPS), RMSNorm(config.width, NORM_EPS)),
        attention=RotarySegmentAttention(config.width, config.heads),
        mlp=SwiGLU(config.width, config.inner),
        full=full,
        unit=config.merge**2,
    )


def tower(checkpoint: Checkpoint, dtype: str, form: str) -> nn.Module:
    """The tower with the checkpoint's weights, the same in every form."""
    with torch.device("meta"):
        module = Tower(read_config(checkpoint))
    checkpoint.load_into(module, prefixes=PREFIXES, dtype=dtype)
    for layer in module.modules():
        if isinstance(layer, SwiGLU):
            layer.align()
    return module.eval()


def weight_names(checkpoint: Checkpoint, config: Config) -> Mapping[str, str]:
    """The tower's tensors: name in the tower -> name in the checkpoint."""
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Tower(config).state_dict().items()}
    return checkpoint.check_names(expected, checkpoint.resolve_prefix(PREFIXES))


def preprocess(config: Config, pixels: Pixels) -> MediaItem:
    return to_patches(config.rule, pixels)


def prepare(config: Config, media: Sequence[MediaItem], form: str) -> dict[str, Tensor]:
    """All engine inputs of a call, from the items' patches and grids alone."""
    grids_I3 = grids_of(media)
    grid.check_grids(grids_I3, config.merge)
    config.rule.check_patches(media)
    patches = torch.cat([item.patches for item in media]) if len(media) > 1 else media[0].patches
    tables = FORMS[form].tables(grids_I3, config.merge, config.window_side)
    return {"patches": patches, **tables}


def grids_of(media: Sequence[MediaItem]) -> Tensor:
    return torch.tensor([item.grid for item in media], dtype=torch.int64).reshape(-1, 3)


def profile_from(config: Config, name: str, bounds: MediaBounds) -> ShapeProfile:
    return packed.bounded(name, bounds, config.rule, config.window_side)


def profiles(config: Config) -> Mapping[str, ShapeProfile]:
    """`any` first, then the names that every family has."""
    named = {name: profile_from(config, name, bounds) for name, bounds in NAMED_BOUNDS.items()}
    return {"any": packed.any_mix(config.window_side), **named}


def num_tokens(config: Config, item: MediaItem) -> int:
    frames, rows, columns = item.grid
    return frames * rows * columns // config.merge**2


def reference(checkpoint: Checkpoint) -> Reference:
    return TransformersTower(checkpoint)


class TransformersTower:
    """The Hugging Face class with the same weights, float32, attention by SDPA."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        self.config = read_config(checkpoint)
        known: dict[str, Any] = dict(checkpoint.view.section("vision_config").items())
        known.pop("model_type", None)
        vision = Qwen2_5_VLVisionConfig(**{**known, "attn_implementation": "sdpa"})
        with torch.device("meta"):
            module = Qwen2_5_VisionTransformerPretrainedModel(vision)
        checkpoint.load_into(module, prefixes=PREFIXES, dtype="float32")
        # Its table is a buffer outside the state, so it has to be made anew off the meta device.
        module.rotary_pos_emb = type(module.rotary_pos_emb)(vision)
        self.module = module.eval()

    @torch.inference_mode()
    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        patches = torch.cat([item.patches for item in items])
        grids = torch.tensor([item.grid for item in items])
        return {"embeds": self.module(patches, grid_thw=grids).pooler_output}

    def blocks(self, items: Sequence[MediaItem]) -> list[tuple[Tensor, Tensor]]:
        """Taken by hooks; transformers works in window order, undone here with its own index."""
        from transformers.vision_utils import get_vision_window_index

        grids = torch.tensor([item.grid for item in items])
        rule = self.config.rule
        index, _ = get_vision_window_index(
            grids,
            spatial_merge_size=rule.merge,
            window_size=self.config.window_size,
            patch_size=rule.patch,
        )
        undo, unit = torch.argsort(index), rule.merge**2
        taken: list[tuple[Tensor, Tensor]] = []

        def keep(_: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            taken.append((take_cells(given[0], undo, unit), take_cells(result, undo, unit)))

        hooks = [block.register_forward_hook(keep) for block in self.module.blocks]
        try:
            self.run(items)
        finally:
            for hook in hooks:
                hook.remove()
        return taken


def text_model(checkpoint: Checkpoint) -> nn.Module:
    """The Hugging Face language model, without weights."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    config: Any = Qwen2_5_VLConfig.from_dict(dict(checkpoint.config)).text_config
    config._attn_implementation = "sdpa"  # noqa: SLF001  transformers has no other way to say it here
    with torch.device("meta"):
        return Qwen2_5_VLTextModel(config)


SLOTS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
LANGUAGE: LanguageRule[Config] = LanguageRule(
    build=text_model,
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
    read_config=read_config,
    parse_config=parse_config,
    weight_names=weight_names,
    tower=tower,
    preprocess=preprocess,
    prepare=prepare,
    axes=lambda config, form: FORMS[form].axes(config.merge, config.window_side),
    forms=("runs", "rows", "bounds"),
    capture_sizes=lambda config, budget, frames: capture_sizes(budget, frames, config.window_side),
    profiles=profiles,
    profile_from=profile_from,
    outputs=("embeds",),
    row_width=lambda config: config.rule.row_width,
    merge=lambda config: config.merge,
    num_tokens=num_tokens,
    attention_work=lambda config, media, form: packed.score_counts(
        grids_of(media), config.merge, config.window_side, form
    ),
    shape_sets=lambda config: packed.revealing_mixes(config.merge, config.window_side),
    reference=reference,
    position_rule="time_scaled",
    pruning_rule="evs",
    frames_apart=True,
    language=LANGUAGE,
    limits={
        "float32": Limit(relative_l2=1e-5, worst_token=5e-5, origin=ORIGIN),
        "bfloat16": Limit(relative_l2=0.15, worst_token=0.3, origin=BFLOAT16_ORIGIN),
        "float16": Limit(relative_l2=0.02, worst_token=0.04, origin=FLOAT16_ORIGIN),
    },
)
