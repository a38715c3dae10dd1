"""Kimi-VL: MoonViT at native resolution, 2x2 merger, projector; DeepSeek-V3's decoder.

In this order: config, image processing, packing, tower, reference, prompt.
I items, M merged cells, N patches of a call, H heads, D head width, K pairs of a head, C width, R rows and S
columns of the table of positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlexport.checkpoint import MAX_LAYERS, Checkpoint
from vlexport.errors import InputError, LimitError
from vlexport.recipe import LanguageRule, Limit, PromptRule, Recipe, known_text_model
from vlexport.specs import BYTES, MediaBounds, MediaItem, Pixels, Range
from vlexport.vision import grid, rotary
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.attention.packing import Mixes, Structure
from vlexport.vision.attention.segmentation import CallSizes
from vlexport.vision.blocks import Block, FusedAttention, GeluMlp, LayerNorm, PatchKernel, PatchMerger
from vlexport.vision.grid_tower import GridConfig, GridPacking
from vlexport.vision.position_tables import resized_rows
from vlexport.vision.preprocess import (
    HALVES,
    NO_SETTINGS,
    PatchRule,
    ResizeRule,
    channels_first,
    first_rows,
    normalisation,
    resample,
)
from vlexport.vision.slices import rows_of_image
from vlexport.vision.tower import StagedTower

# modeling_kimi_vl.py of the release: every norm has torch's own epsilon, rotation this base, and its table
# of angles ends at this side in patches.
NORM_EPS, THETA, MOST_SIDE = 1e-5, 10000.0, 512
SIDES = ("height", "width")
IMAGES_ONLY = "This family takes images only: pass the frames of a video as images."
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
# Parts of a tensor's name here, and in the checkpoint; replaced in this order.
NAMES = (
    ("merger.ln_q.", f"{PROJECTOR}pre_norm."), ("merger.mlp.0.", f"{PROJECTOR}linear_1."),
    ("merger.mlp.2.", f"{PROJECTOR}linear_2."), ("embed.", f"{TOWER}patch_embed.proj."),
    ("places", f"{TOWER}patch_embed.pos_emb.weight"), ("blocks.", f"{TOWER}encoder.blocks."),
    (".norm1.", ".norm0."), (".norm2.", ".norm1."), (".fc1.", ".fc0."), (".fc2.", ".fc1."),
    (".attn.qkv.", ".wqkv."), (".attn.proj.", ".wo."),
)  # fmt: skip
FINAL_NORM = f"{TOWER}encoder.final_layernorm."


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(GridConfig):
    """The numbers of config.json and preprocessor_config.json that shape graph and inputs.

    `table_sides` are those of the learned table of positions. The largest area of `rule` is a number of
    patches; images are made smaller, never larger.
    """

    table_sides: tuple[int, ...]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Config:
        vision = checkpoint.view.section("vision_config")
        vision.require_divisor("num_attention_heads", "hidden_size", even=True)
        kernel = vision.get_ints("merge_kernel_size", (2, 2))
        if len(kernel) != 2 or kernel[0] != kernel[1] or not 1 <= kernel[0] <= 1024:
            vision.refuse("merge_kernel_size", list(kernel), "two equal sides, as all releases have")
        patch = vision.get_size("patch_size", 14, 1024)
        return cls(
            depth=vision.require_size("num_hidden_layers", MAX_LAYERS),
            width=vision.require_size("hidden_size"),
            heads=vision.require_size("num_attention_heads"),
            inner=vision.require_size("intermediate_size"),
            out_width=checkpoint.text_config.require_size("hidden_size"),
            table_sides=tuple(vision.get_size(f"init_pos_emb_{side}", 64, 4096) for side in SIDES),
            rule=image_rule(checkpoint, patch, kernel[0]),
        )


def image_rule(checkpoint: Checkpoint, patch: int, merge: int) -> PatchRule:
    """Return the rule of the image processor, whose defaults are those of the release's code."""
    settings = checkpoint.image_processor()
    settings.check_fixed({"patch_size": patch, "merge_kernel_size": [merge, merge], **NO_SETTINGS})
    if not settings.get_bool("pad_input", False):
        settings.refuse("pad_input", False, "true: images that are cropped do not divide into merged cells")
    mean, std, rescale, resampling = normalisation({**HALVES, **settings.values})
    area = ResizeRule(min_pixels=1, max_pixels=settings.get_size("in_token_limit", 4096, 2**24) * patch**2)
    return PatchRule(
        patch=patch, merge=merge, temporal=1,
        mean=mean, std=std, rescale=rescale, resample=resampling, image=area, video=area,
    )  # fmt: skip


def preprocess(config: Config, pixels: Pixels) -> MediaItem:
    """Shrink an image to the largest number of patches, fill it up with black, cut it row by row."""
    if pixels.kind != "image" or len(pixels.frames) != 1:
        raise InputError(f"{pixels.kind} of {len(pixels.frames)} frames given. {IMAGES_ONLY}")
    rule, frames_1CHW = config.rule, channels_first(pixels)
    height, width = frames_1CHW.shape[2:]
    rows, columns = resized(height, width, rule)
    if (rows, columns) != (height, width):
        frames_1CHW = resample(frames_1CHW, rows, columns, "bicubic")
    cell = rule.merge * rule.patch
    frames_1CHW = F.pad(frames_1CHW, (0, -columns % cell, 0, -rows % cell))
    down, across = (side // rule.patch for side in frames_1CHW.shape[2:])
    if max(down, across) >= MOST_SIDE:
        raise LimitError(
            f"image of {columns}x{rows} pixels: fewer than {MOST_SIDE} patches of {rule.patch} pixels a side "
            "expected. Crop it, or cut it into several images."
        )
    pixels_1CHW = frames_1CHW if rule.input_dtype == BYTES else rule.levels.normalise(frames_1CHW)
    patches = rows_of_image(pixels_1CHW, rule.patch)
    return MediaItem(kind="image", patches=patches, grid=(1, down, across))


def resized(height: int, width: int, rule: PatchRule) -> tuple[int, int]:
    """Return the size before it is filled up; only whole patches count, and sides are cut to whole pixels."""
    patches, most = (height // rule.patch) * (width // rule.patch), most_patches(rule)
    if patches <= most:
        return height, width
    scale = math.sqrt(most / patches)
    rows, columns = int(height * scale), int(width * scale)
    if min(rows, columns) < 1:
        raise LimitError(f"image of {width}x{height} pixels: too narrow to be made smaller. Crop or pad it.")
    return rows, columns


def most_patches(rule: PatchRule) -> int:
    return rule.image.max_pixels // rule.patch**2


def most_cells(rule: PatchRule, pixels: int) -> int:
    """Return the most cells of an image of at most `pixels`; strips gain most by being filled up."""
    cell, most = rule.patch * rule.merge, 1
    for across in range(1, MOST_SIDE // rule.merge):
        narrowest = cell * (across - 1) + 1
        # Made smaller, an image has at most `most * (1 + 1 / wide) * (1 + 1 / high)` whole patches, because
        # each side was up to a patch longer than the whole ones that were counted.
        wide = max(1, narrowest // rule.patch)
        share = most_patches(rule) * (wide + 1)
        high = (share + math.sqrt(share**2 + 4 * wide**2 * share)) / (2 * wide**2)
        longest = min(rule.patch * (int(high) + 1), (MOST_SIDE - 1) // rule.merge * cell)
        most = max(most, across * -(-min(pixels // narrowest, longest) // cell))
    return most


# Cells of images, two of each number: graphs are traced with them, and no size may be 1 there.
ALBUM = ((3, 5), (5, 3), (2, 4), (4, 2), (1, 6), (2, 3))


class RasterPacking(GridPacking):
    """Patches row by row as the processor cuts them; `raster` finds those of each cell."""

    per_patch = ("positions", "sides", "raster")
    takes_cells = False

    def check(self, media: Sequence[MediaItem]) -> None:
        super().check(media)
        for number, item in enumerate(media):
            if item.kind != "image":
                raise InputError(f"item {number}: a {item.kind} given. {IMAGES_ONLY}")

    def row_tables(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        """Return place, sides of the image and number of each patch, cell by cell in the order of items."""
        grids_I3, unit = structure["grids"], self.unit
        positions_N2 = grid.patch_positions(grids_I3, self.merge)
        item_N = grid.cells(grids_I3, self.merge).item_M.repeat_interleave(unit)
        area_I, sides_N2 = grids_I3.prod(-1), grids_I3[item_N, 1:]
        start_N = (area_I.cumsum(0) - area_I)[item_N]
        raster_N = start_N + positions_N2[:, 0] * sides_N2[:, 1] + positions_N2[:, 1]
        return {"positions": positions_N2, "sides": sides_N2, "raster": raster_N}

    def sizes(self, bounds: MediaBounds | None) -> CallSizes:
        if bounds is None:
            largest = ((MOST_SIDE - 1) // self.merge) ** 2
            return self._sizes(Range(1, 1024, 65536), frames=4096, usual_runs=4, largest=largest)
        cell, images = self.rule.patch * self.merge, bounds.max_images + bounds.max_frames
        shrunk = most_patches(self.rule) // self.unit
        largest = most_cells(self.rule, bounds.max_pixels)
        # Made smaller, an image loses less than half of the patches that it may have.
        least = max(1, min(-(-bounds.min_pixels // cell**2), shrunk // 2))
        usual = max(least, min(bounds.max_pixels // cell**2, shrunk, largest))
        return self._sizes(
            Range(least, usual, images * largest), frames=images, usual_runs=1, largest=largest
        )

    def mixes(self) -> Mixes:
        images = {
            name: mix for name, mix in super().mixes().items() if {kind for kind, _ in mix} == {"image"}
        }
        album = [("image", (1, self.merge * rows, self.merge * columns)) for rows, columns in ALBUM]
        return {**images, "album": album, "mix": album[::2]}


class Tower(StagedTower):
    """The vision tower with its merger and projector."""

    frequencies: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.packing = RasterPacking(config.rule)
        rule, width = config.rule, config.width
        self.embed = PatchKernel((3, rule.patch, rule.patch), width)
        self.places = nn.Parameter(torch.empty(*config.table_sides, width))
        self.blocks = nn.ModuleList(block(config) for _ in range(config.depth))
        self.norm = LayerNorm(width, eps=NORM_EPS)
        self.merger = PatchMerger(LayerNorm(width, eps=NORM_EPS), width, rule.merge**2, config.out_width)
        frequencies = rotary.inverse_frequencies(width // config.heads, THETA)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, CallLayout]:
        positions_N2 = inputs["positions"]
        layout = CallLayout.of(inputs, self.packing.segmentations, self.packing.unit)
        column_row_NK = rotary.angles(positions_N2.flip(1), self.frequencies)
        # Pairs are turned by column and row in turns.
        layout = layout.with_rotary(column_row_NK.unflatten(1, (2, -1)).transpose(1, 2).flatten(1))
        patches = inputs["patches"].index_select(0, inputs["raster"])
        x_NC = self.embed(first_rows(patches, self.packing.levels, self.embed))
        x_NC = x_NC + resized_rows(self.places, positions_N2, inputs["sides"]).to(x_NC.dtype)
        return layout.arrange(x_NC), layout

    def finish(self, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        return {"embeds": self.merger(self.norm(x)).index_select(0, layout.inverse_M)}


def block(config: Config) -> Block:
    return Block(
        "frame",
        norms=[LayerNorm(config.width, eps=NORM_EPS) for _ in range(2)],
        attention=FusedAttention(config.width, config.heads, neighbours=True),
        mlp=GeluMlp(config.width, config.inner, exact=False),
    )


def stored_names(
    checkpoint: Checkpoint, config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, str]:
    names = {name: stored_name(name) for name in shapes}
    return checkpoint.check_parts(names, shapes, {TOWER: (), PROJECTOR: ()})


def stored_name(name: str) -> str:
    if name.startswith("norm."):
        return name.replace("norm.", FINAL_NORM)
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return name


class PlainBlock(nn.Module):
    """One block of the reference, under the names of the checkpoint."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.ModuleDict({"fc0": nn.Linear(width, inner), "fc1": nn.Linear(inner, width)})

    def forward(self, x_NC: Tensor, turns_NK: Tensor) -> Tensor:
        heads = x_NC.shape[1] // turns_NK.shape[1] // 2
        q_HND, k_HND, v_HND = self.wqkv(self.norm0(x_NC)).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        q_HND, k_HND = (turned(rows, turns_NK) for rows in (q_HND, k_HND))
        seen_HND = F.scaled_dot_product_attention(q_HND[None], k_HND[None], v_HND[None])[0]
        x_NC = x_NC + self.wo(seen_HND.transpose(0, 1).flatten(1))
        inner = F.gelu(self.mlp["fc0"](self.norm1(x_NC)), approximate="tanh")
        out_NC: Tensor = x_NC + self.mlp["fc1"](inner)
        return out_NC


def turned(x_HND: Tensor, turns_NK: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_HND.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns_NK).flatten(-2).to(x_HND.dtype)


class ImageByImage:
    """The reference: one image at a time, turned as complex numbers; no number comes from `Config`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        shapes = checkpoint.shapes((TOWER, PROJECTOR))
        width, _, patch, _ = shapes[f"{TOWER}patch_embed.proj.weight"]
        inner = shapes[f"{TOWER}encoder.blocks.0.mlp.fc0.weight"][0]
        out, wide = shapes[f"{PROJECTOR}linear_2.weight"]
        depth = len([name for name in shapes if name.endswith(".wqkv.weight")])
        vision: Any = checkpoint.config["vision_config"]
        self.pairs, self.kernel = width // vision["num_attention_heads"] // 2, math.isqrt(wide // width)
        with torch.device("meta"):
            blocks = nn.ModuleList(PlainBlock(width, inner) for _ in range(depth))
            table = nn.Parameter(torch.empty(shapes[f"{TOWER}patch_embed.pos_emb.weight"]))
            places = nn.ParameterDict({"weight": table})
            embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch), "pos_emb": places})
            encoder = nn.ModuleDict({"blocks": blocks, "final_layernorm": nn.LayerNorm(width)})
            self.tower: Any = nn.ModuleDict({"patch_embed": embed, "encoder": encoder})
            layers = {"linear_1": nn.Linear(wide, wide), "linear_2": nn.Linear(wide, out)}
            self.projector: Any = nn.ModuleDict({"pre_norm": nn.LayerNorm(width), **layers})
        for part, prefix in ((self.tower, TOWER), (self.projector, PROJECTOR)):
            checkpoint.load_into(part, prefixes=(prefix,), dtype="float32")
        self.module: nn.Module = nn.ModuleList([self.tower, self.projector]).eval()
        # modeling_kimi_vl.py of the release: `1.0 / (theta_base ** (arange(0, dim, 4) / dim))`, a buffer.
        speed_K = 1.0 / 10000.0 ** (torch.arange(0, 2 * self.pairs, 4).float() / (2 * self.pairs))
        self.module.register_buffer("speed_K", speed_K, persistent=False)

    @torch.inference_mode()
    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        return {"embeds": torch.cat([self.tokens(item, self.rows(item)[-1]) for item in items])}

    def tokens(self, item: MediaItem, last_NC: Tensor) -> Tensor:
        rows_NC = self.tower["encoder"]["final_layernorm"](last_NC)
        cells_NC = self.projector["pre_norm"](self.in_cells(rows_NC, item))
        wide_MC = cells_NC.unflatten(0, (-1, self.kernel**2)).flatten(1)
        tokens_MC: Tensor = self.projector["linear_2"](F.gelu(self.projector["linear_1"](wide_MC)))
        return tokens_MC

    def rows(self, item: MediaItem) -> list[Tensor]:
        embed, (_, height, width) = self.tower["patch_embed"], item.grid
        side = embed["proj"].kernel_size[0]
        rows_NC = embed["proj"](item.patches.unflatten(1, (3, side, side))).flatten(1)
        stages = [rows_NC + resized_table(embed["pos_emb"]["weight"], height, width)]
        turns_NK = turns(height, width, self.module.get_buffer("speed_K"))
        for block in self.tower["encoder"]["blocks"]:
            stages.append(block(stages[-1], turns_NK))
        return stages

    def in_cells(self, rows_NC: Tensor, item: MediaItem) -> Tensor:
        split = rows_NC.unflatten(0, (item.grid[1] // self.kernel, self.kernel, -1, self.kernel))
        cells_NC: Tensor = split.transpose(1, 2).flatten(0, 3)
        return cells_NC

    @torch.inference_mode()
    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        every = [(item, self.rows(item)) for item in items]
        outputs = {"embeds": torch.cat([self.tokens(item, rows[-1]) for item, rows in every])}
        stages = [[self.in_cells(rows_NC, item) for rows_NC in rows] for item, rows in every]
        joined = [torch.cat(stage) for stage in zip(*stages, strict=True)]
        return outputs, list(pairwise(joined))


def resized_table(table_RSC: Tensor, height: int, width: int) -> Tensor:
    if table_RSC.shape[:2] == (height, width):
        return table_RSC.flatten(0, 1)
    resized_1CHW = F.interpolate(table_RSC.permute(2, 0, 1)[None], size=(height, width), mode="bicubic")
    return resized_1CHW[0].permute(1, 2, 0).flatten(0, 1)


def turns(height: int, width: int, speed_K: Tensor) -> Tensor:
    """Return a complex number of length 1 for each pair of a head: column and row in turns."""
    rows_HW, columns_HW = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [place.flatten().float()[:, None] * speed_K for place in (columns_HW, rows_HW)]
    angles_NK = torch.stack(angles, dim=-1).flatten(1)
    return torch.polar(torch.ones_like(angles_NK), angles_NK)


MEDIA = "<|media_pad|>"
LANGUAGE: LanguageRule[Config] = LanguageRule(
    build=lambda checkpoint: known_text_model(checkpoint, "deepseek_v3", nulls=("q_lora_rank",)),
    prefixes=("language_model.model.",),
    heads=("language_model.lm_head.weight",),
    prompt=PromptRule(
        markers={"image": MEDIA}, slots={"image": MEDIA}, expand=lambda config, item: MEDIA * item.num_rows
    ),
)
ORIGIN = (
    "ours and the reference in float64 differ by 2.4e-6, one token by 4.5e-6, on towers of 2 and 3 blocks"
)
BFLOAT16_ORIGIN = "the reference's own bfloat16 is off by 0.094, one token by 0.16, with 27 blocks"
FLOAT16_ORIGIN = "the reference's own float16 is off by 0.013, one token by 0.021, with 27 blocks"

RECIPE = Recipe(
    name="kimi_vl",
    summary="Kimi-VL A3B: MoonViT at native resolution, images in one engine",
    model_types=("kimi_vl",),
    config=Config,
    packing=lambda config: RasterPacking(config.rule),
    modules=Tower,
    stored_names=stored_names,
    preprocess=preprocess,
    reference=ImageByImage,
    position_rule="linear",
    pruning_rule=None,
    language=LANGUAGE,
    limits={
        "float32": Limit(relative_l2=1e-5, worst_token=5e-5, origin=ORIGIN),
        "bfloat16": Limit(relative_l2=0.15, worst_token=0.3, origin=BFLOAT16_ORIGIN),
        "float16": Limit(relative_l2=0.02, worst_token=0.04, origin=FLOAT16_ORIGIN),
    },
)
