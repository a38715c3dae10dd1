"""Nemotron-Nano-VL: RADIO on images, tiles and tubelets, pixel shuffle, projector.

`nemotron_h_omni` keeps the resolution of images, and two frames of a video make a tubelet. The older
`NemotronH_Nano_VL_V2` cuts images into tiles; a frame of a video is one tile.

In this order: config, image processing, packing, tower, reference, prompt.
I items, F frames or tubelets, M tokens, N patches of a call, R rows of blocks (those of patches and learned
ones), C width, S side of the table of positions, P values of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlexport.checkpoint import MAX_LAYERS, Checkpoint
from vlexport.checkpoint.config import ConfigView
from vlexport.errors import InputError, LimitError, UnsupportedError
from vlexport.recipe import LanguageRule, Limit, PromptItem, PromptRule, Recipe, text_model_of
from vlexport.specs import Dim, MediaBounds, MediaItem, Multiple, Pixels, Range, ShapeProfile, Symbol
from vlexport.vision import grid
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.attention.packing import Mixes, Packing, Structure
from vlexport.vision.attention.segmentation import CallSizes, Segments
from vlexport.vision.blocks import Block, FusedAttention, GeluMlp, LayerNorm, RMSNorm
from vlexport.vision.grid_tower import GridPacking
from vlexport.vision.packed_reference import with_blocks
from vlexport.vision.position_tables import rows_between
from vlexport.vision.preprocess import (
    CLIP,
    MAX_ASPECT,
    NO_SETTINGS,
    PatchRule,
    PixelNormalisation,
    ResizeRule,
    channels_first,
    normalisation,
    seconds_per_grid,
)
from vlexport.vision.slices import rows_of_image
from vlexport.vision.tower import StagedTower

# Those of RadioConfig: released files leave out what is as in C-RADIO-H.
WIDTH, DEPTH, HEADS, NORM_EPS, TABLE_PIXELS, CLASSES, REGISTERS = 1280, 32, 16, 1e-6, 2048, 3, 7
# transformers builds the projector with this epsilon, whatever config.json gives.
PROJECTOR_EPS = 1e-5
# Remote code that cuts tiles, whose facts docs/recipes.md gives the sources of, and its name for RADIO.
TILED, HUGE = "NemotronH_Nano_VL_V2", "vit_huge_patch16_224"
RADIO, PROJECTOR, FINAL_NORM = "vision_model.radio_model.model.", "mlp1.", "vision_final_layernorm."
# Names in released files, and what transformers calls them now.
RENAMED = {
    "text_config": "llm_config", "vision_hidden_size": "vit_hidden_size",
    "image_mean": "norm_mean", "image_std": "norm_std",
}  # fmt: skip
TOKENS = Packing.cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The numbers of config.json and of the processors' files that shape graph and inputs.

    learned       rows of classes and registers before the patches of every frame
    table_side    rows and columns of the learned table of positions
    final_norm    between tower and projector: none, plain (without weights), stored
    layer_scale   whether branches of blocks are scaled by stored weights
    square        whether videos lose their aspect ratio
    tiles         the most tiles of an image, all as large as `rule` bounds images; None where it is not cut
    thumbnail     whether the whole image follows its tiles, as a tile of its own
    """

    depth: int
    width: int
    heads: int
    inner: int
    eps: float
    learned: int
    table_side: int
    projector_width: int
    out_width: int
    final_norm: str
    layer_scale: bool
    square: bool
    tiles: int | None
    thumbnail: bool
    rule: PatchRule

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Config:
        view = checkpoint.view
        vision, text = view.section("vision_config"), section(view, "text_config")
        for key, expected in (("hidden_act", "gelu"), ("use_swiglu_ffn", False), ("qkv_bias", True)):
            if dict(vision.items()).get(key, expected) != expected:
                vision.refuse(key, dict(vision.items())[key], f"{expected!r}, as all releases have")
        width, heads = vision.get_size("hidden_size", WIDTH), vision.get_size("num_attention_heads", HEADS)
        if width % heads or view.get_size(renamed(view, "vision_hidden_size"), width) != width:
            vision.refuse("hidden_size", width, f"a multiple of {heads} heads, and 'vision_hidden_size'")
        tiled = checkpoint.model_type == TILED
        if tiled:
            check_tiled(view, vision)
        temporal = 1 if tiled else vision.require_size("video_temporal_patch_size", 64)
        if temporal != view.get_size("video_temporal_patch_size", temporal):
            vision.refuse("video_temporal_patch_size", temporal, "the value at the top of the file")
        names = checkpoint.tensor_names()
        has_scale = any(".layer_scale" in name for name in names)
        if not has_scale and vision.get_float("layerscale_value", 1.0) != 1.0:
            vision.refuse("layerscale_value", vision.get_float("layerscale_value", 1.0), "1.0, or weights")
        stored = "stored" if f"{FINAL_NORM}weight" in names else "plain"
        patch = vision.get_size("patch_size", 16, 1024)
        learned = vision.get_size("num_cls_tokens", CLASSES) + vision.get_int("num_registers", REGISTERS)
        table_side = vision.get_size("max_img_size", TABLE_PIXELS) // patch
        if tiled:
            # Files of RADIO's own code count these in settings of its training.
            learned = checkpoint.stored(f"{RADIO}patch_generator.cls_token.token").shape[0]
            table_side = math.isqrt(checkpoint.stored(f"{RADIO}patch_generator.pos_embed").shape[1])
        merge, image = round(1 / view.get_float("downsample_ratio", 0.5)), checkpoint.image_processor()
        return cls(
            depth=vision.get_size("num_hidden_layers", DEPTH, MAX_LAYERS),
            width=width,
            heads=heads,
            inner=int(width * vision.get_float("mlp_ratio", 4.0)),
            eps=vision.get_float("layer_norm_eps", NORM_EPS),
            learned=learned,
            table_side=table_side,
            projector_width=view.get_size("projector_hidden_size", 4096),
            out_width=text.require_size("hidden_size"),
            final_norm=stored if text.get_int("num_nextn_predict_layers", 0) > 0 else "none",
            layer_scale=has_scale,
            square=tiled or not checkpoint.video_processor().get_bool("video_maintain_aspect_ratio", True),
            tiles=image.get_size("max_num_tiles", 12, 64) if tiled else None,
            thumbnail=tiled and image.get_bool("use_thumbnail", True),
            rule=patch_rule(checkpoint, patch, merge, temporal),
        )


def check_tiled(view: ConfigView, vision: ConfigView) -> None:
    if (shuffle := view.get_str("ps_version", "v1")) != "v2":
        view.refuse("ps_version", shuffle, "'v2', which keeps rows and columns of a tile in place")
    if (name := vision.get_str("args.model", HUGE)) != HUGE:
        vision.refuse("args.model", name, f"{HUGE!r}, as releases have")
    args = vision.section("args") if vision.has("args") else vision
    unknown = ("video_temporal_patch_size", "vitdet_window_size", "feature_normalizer_config")
    # With a bound of patches images keep their resolution, as those of `nemotron_h_omni` do.
    for part, key in ((args, "min_num_patches"), *((vision, key) for key in unknown)):
        if part.has(key) and part.values[key] != 1:
            part.refuse(key, part.values[key], f"none, as in releases of {TILED}")


def renamed(view: ConfigView, key: str) -> str:
    return key if view.has(key) else RENAMED[key]


def section(view: ConfigView, key: str) -> ConfigView:
    return view.section(renamed(view, key))


def patch_rule(checkpoint: Checkpoint, patch: int, merge: int, temporal: int) -> PatchRule:
    """Return the rule of both processors; bounds of a frame are numbers of patches, in pixels."""
    image, video = checkpoint.image_processor(), checkpoint.video_processor()
    view, tiled, norms = checkpoint.view, checkpoint.model_type == TILED, []
    # Releases of other model types leave them out.
    levels = {
        RENAMED[key]: view.get_floats(RENAMED[key], ()) if tiled else value for key, value in CLIP.items()
    }
    for settings in (image, video):
        settings.check_fixed({"patch_size": patch, "downsample_ratio": 1 / merge, **NO_SETTINGS})
        values = dict(settings.items())
        named = {key: values.get(renamed(settings, key)) or levels[RENAMED[key]] for key in CLIP}
        norms.append(normalisation({**settings.values, **named}))
    if norms[0] != norms[1]:
        video.refuse("norm_mean", norms[1][0], "what images are normalised by")
    mean, std, rescale, resample = norms[0]
    if tiled:
        least = most = target = tile_patches(view, image, patch, merge)
    else:
        least, most, target = resolution_bounds(image, video, merge)
    bounds = [ResizeRule(min_pixels=low * patch**2, max_pixels=high * patch**2)
              for low, high in ((least, most), (target, target))]  # fmt: skip
    return PatchRule(
        patch=patch, merge=merge, temporal=temporal,
        mean=mean, std=std, rescale=rescale, resample=resample, image=bounds[0], video=bounds[1],
    )  # fmt: skip


def tile_patches(view: ConfigView, image: ConfigView, patch: int, merge: int) -> int:
    side = view.require_size("force_image_size", 8192)
    if side % (patch * merge) or image.get_size("image_size", side) != side:
        view.refuse("force_image_size", side, f"a multiple of {patch * merge}, and the processor's own")
    thumbnail = image.get_bool("use_thumbnail", True)
    if view.get_bool("use_thumbnail", thumbnail) != thumbnail:
        view.refuse("use_thumbnail", not thumbnail, "the value of the processor's settings")
    return (side // patch) ** 2


def resolution_bounds(image: ConfigView, video: ConfigView, merge: int) -> tuple[int, int, int]:
    least = image.get_size("min_num_patches", 1024, 65536)
    # A call of one image: in transformers further ones may raise what the context leaves for each.
    most = (image.get_size("max_model_len", 16384) - 4) * merge**2
    most = max(least, min(most, image.get_int("max_num_patches", 13312) or most))
    return least, most, video.get_size("video_target_num_patches", 1024, 65536)


def preprocess(config: Config, pixels: Pixels) -> MediaItem:
    """Resize in float32, so that overshoot stays, and cut row by row; an odd last frame is repeated."""
    rule, frames_TCHW = config.rule, channels_first(pixels)
    height, width = frames_TCHW.shape[2:]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise LimitError(
            f"{pixels.kind} of {width}x{height} pixels: sides of at most {MAX_ASPECT}:1 expected. "
            "Crop or pad it."
        )
    is_image, levels = pixels.kind == "image", rule.levels
    keeps_resolution = is_image and not config.tiles
    if keeps_resolution:
        sides = image_sides(height, width, rule)
    else:
        sides = video_sides(1.0 if config.square else width / height, rule, square=config.square)
        levels = PixelNormalisation(mean=rule.mean, std=rule.std, divisor=255.0)
    size = (sides[0] * rule.patch, sides[1] * rule.patch)
    if is_image and config.tiles:
        frames = tiles_of(frames_TCHW, size[0], config)
    else:
        # Frame by frame: as floats, those of a long video would take four times their memory.
        frames = [resized(frame, *size) for frame in frames_TCHW.split(1)]
    frames_TCHW = levels.normalise(torch.cat(frames))
    if keeps_resolution:
        # The tower does not look at what fills up the row.
        frames_TCHW = frames_TCHW.expand(rule.temporal, -1, -1, -1)
    short = -len(frames_TCHW) % rule.temporal
    frames_TCHW = torch.cat([frames_TCHW, frames_TCHW[-1:].expand(short, -1, -1, -1)])
    tubelets = frames_TCHW.unflatten(0, (-1, rule.temporal)).flatten(1, 2)
    return MediaItem(
        kind=pixels.kind,
        patches=rows_of_image(tubelets, rule.patch),
        grid=(len(tubelets), *sides),
        seconds_per_grid=seconds_per_grid(pixels, rule.temporal),
        frame_seconds=times(pixels),
    )


def resized(frame_1CHW: Tensor, height: int, width: int) -> Tensor:
    if frame_1CHW.shape[2:] == (height, width):
        return frame_1CHW
    return F.interpolate(frame_1CHW.float(), (height, width), mode="bicubic", antialias=True)


def tiles_of(image_1CHW: Tensor, side: int, config: Config) -> list[Tensor]:
    height, width = image_1CHW.shape[2:]
    down, across = tile_grid(height, width, side, config.tiles or 1)
    whole = resized(image_1CHW, down * side, across * side)
    tiles = [tile for row in whole.split(side, dim=2) for tile in row.split(side, dim=3)]
    return [*tiles, resized(image_1CHW, side, side)] if config.thumbnail and len(tiles) > 1 else tiles


def tile_grid(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Return rows and columns of tiles nearest to the aspect ratio of the image.

    Of equally near ones, more tiles are taken while the image has more than half their pixels.
    """
    sides = range(1, most + 1)
    grids = sorted((grid for grid in product(sides, sides) if math.prod(grid) <= most), key=math.prod)
    distances = [abs(width / height - across / down) for down, across in grids]
    first, *further = (grid for grid, far in zip(grids, distances, strict=True) if far == min(distances))
    filled = [grid for grid in further if 2 * height * width > side**2 * math.prod(grid)]
    return filled[-1] if filled else first


def image_sides(height: int, width: int, rule: PatchRule) -> tuple[int, int]:
    """Return rows and columns of patches near those of the image, within the bounds of their number."""
    least, most = (bound // rule.patch**2 for bound in (rule.image.min_pixels, rule.image.max_pixels))
    down, across = (round(side / rule.patch + 0.5) for side in (height, width))
    shrink = min(math.sqrt(most / (down * across)), 1.0)
    down, across = math.floor(shrink * down), math.floor(shrink * across)
    if min(down, across) < 1:
        raise LimitError(f"image of {width}x{height} pixels: too narrow to be made smaller. Crop or pad it.")
    if most > least > down * across:
        grow = math.sqrt(least / (down * across))
        down, across = math.ceil(grow * down), math.ceil(grow * across)
    down = _whole(down, across, rule.merge, most)
    return down, _whole(across, down, rule.merge, most)


def _whole(side: int, other: int, merge: int, most: int) -> int:
    """Return the side in whole cells: more where the bound allows it, else fewer, but one."""
    longer = side + -side % merge
    return longer if longer * other <= most else max(merge, side - side % merge)


def video_sides(ratio: float, rule: PatchRule, *, square: bool) -> tuple[int, int]:
    """Return rows and columns of patches of every frame, near one number whatever its size."""
    target, merge = rule.video.max_pixels // rule.patch**2, rule.merge
    if square:
        side = max(merge, int(math.sqrt(target)) // merge * merge)
        return side, side
    sides = [max(round(math.sqrt(area)), 1) for area in (target / ratio, target * ratio)]
    longer = [side + -side % merge for side in sides]
    if math.prod(longer) <= target:
        return longer[0], longer[1]
    down, across = (max(merge, side - side % merge) for side in sides)
    return down, across


def times(pixels: Pixels) -> tuple[float, ...]:
    """Return the time of each frame; without times of their own, as published, in whole milliseconds each."""
    rate = pixels.frames_per_second
    if pixels.kind != "video" or pixels.seconds or rate is None:
        return pixels.seconds
    numbers = range(pixels.first, pixels.first + len(pixels.frames))
    return tuple(number * int(1000.0 / rate) / 1000.0 for number in numbers)


class RadioPacking(GridPacking):
    """Patches row by row; blocks also have learned rows, before the patches of every frame.

    places    of every patch row, column and the longer side of its frame
    tubelets  whether a patch is of several frames
    rows      the sources of the blocks' rows: learned ones first, then patches
    merged    the blocks' rows of the patches of each cell
    """

    cells = Symbol("rows")
    takes_cells = False
    structure_rows: ClassVar[Mapping[str, Symbol]] = {"grids": Symbol("items"), "videos": Symbol("items")}

    def __init__(self, config: Config) -> None:
        super().__init__(config.rule)
        self.learned, self.tiled, tiles = config.learned, config.tiles is not None, config.tiles or 1
        self.image_frames = tiles + (config.thumbnail and tiles > 1)
        self.per_patch = ("places", "tubelets") if config.rule.temporal > 1 else ("places",)

    def check(self, media: Sequence[MediaItem]) -> None:
        # Tiles of an image are frames of its grid.
        super().check([replace(item, kind="video") if self.tiled else item for item in media])

    def structure(self, media: Sequence[MediaItem]) -> Structure:
        structure, videos = super().structure(media), [int(item.kind == "video") for item in media]
        return {**structure, "videos": torch.tensor(videos)} if "tubelets" in self.per_patch else structure

    def segments(self, structure: Structure) -> Mapping[str, Segments]:
        lengths_F = grid.frames(structure["grids"], 1).lengths_S + self.learned
        return {"frame": Segments(order_M=torch.arange(lengths_F.sum().item()), lengths_S=lengths_F)}

    def row_tables(self, structure: Structure, order_M: Tensor) -> Mapping[str, Tensor]:
        grids_I3 = structure["grids"]
        length_F = grid.frames(grids_I3, 1).lengths_S
        start_F = length_F.cumsum(0) - length_F
        item_N, across_I = grid.cells(grids_I3, 1).item_M, grids_I3[:, 2]
        longest_N = grids_I3[:, 1:].amax(1)[item_N]
        frame_R = torch.repeat_interleave(length_F + self.learned)
        begin_F = start_F + self.learned * torch.arange(length_F.shape[0])
        within_R = torch.arange(frame_R.shape[0]) - begin_F[frame_R]
        cells, inside = grid.cells(grids_I3, self.merge), torch.arange(self.merge)
        across_M11 = across_I[cells.item_M][:, None, None]
        corner_M = begin_F[cells.frame_M] + self.learned + self.merge * cells.column_M
        patch_M11 = corner_M[:, None, None] + self.merge * cells.row_M[:, None, None] * across_M11
        merged_Mmm = patch_M11 + inside[:, None] * across_M11 + inside
        kinds = {"tubelets": structure["videos"][item_N]} if "tubelets" in self.per_patch else {}
        return {
            "places": torch.cat([grid.patch_positions(grids_I3, 1), longest_N[:, None]], dim=1),
            **kinds,
            "rows": torch.where(within_R < self.learned, within_R, within_R + start_F[frame_R]),
            "merged": merged_Mmm.flatten(1),
        }

    def axes(self, layout: str) -> Mapping[str, Mapping[int, Dim]]:
        patches: Dim = Multiple(self.merge**2, TOKENS)
        varying: dict[str, Mapping[int, Dim]] = {key: {0: patches} for key in ("patches", *self.per_patch)}
        varying |= {"rows": {0: self.cells}, "merged": {0: TOKENS}, "embeds": {0: TOKENS}}
        return {**super().axes(layout), **varying}

    def tokens(self, bounds: MediaBounds | None) -> tuple[Range, int, int]:
        if bounds is None:
            return Range(1, 1024, 65536), 4096, 65536
        unit, kinds = self.rule.patch**2, (self.rule.image, self.rule.video)
        (least, budget), (target, _) = ((kind.min_pixels // unit, kind.max_pixels // unit) for kind in kinds)
        # Growing rounds both sides up, which adds less than `least + 1`; of one row a second is made.
        image = 2 * max(budget, 2 * least + 2)
        # Rounding adds half of both sides, of which the longer has at most MAX_ASPECT times the other.
        longer = math.sqrt(MAX_ASPECT * target)
        video = max(target + longer + 2, 2 * longer + 2)
        if self.tiled:
            image = video = budget
        images = bounds.max_images * self.image_frames
        frames = -(-bounds.max_frames // self.rule.temporal)
        cells = [math.ceil(patches / self.merge**2) for patches in (image, video)]
        counts = list(zip(cells, (images, frames), strict=True))
        most = sum(size * count for size, count in counts)
        largest = max(size for size, count in counts if count)
        usual = min(most, max(1, (least if bounds.max_images else target) // self.merge**2))
        return Range(1, usual, most), images + frames, largest

    def mixes(self) -> Mixes:
        tiles: Mixes = {"tiles": [("image", (3, 4, 4)), ("image", (1, 4, 4))]}
        return {**super().mixes(), **(tiles if self.tiled else {})}

    def sizes(self, bounds: MediaBounds | None) -> CallSizes:
        tokens, frames, largest = self.tokens(bounds)
        unit, one = self.merge**2, self.learned
        rows = Range(unit + one, unit * tokens.opt + one, unit * tokens.max + one * frames)
        runs = 4 if bounds is None else 1
        return self._sizes(rows, frames=frames, usual_runs=min(runs, frames), largest=unit * largest + one)

    def profile(self, name: str, bounds: MediaBounds | None) -> ShapeProfile:
        ranges = super().profile(name, bounds).ranges
        return ShapeProfile(name, {**ranges, TOKENS: self.tokens(bounds)[0]})

    def capacity(self, tokens: int, frames: int) -> tuple[int, Mapping[str, int]]:
        return self.merge**2 * tokens + self.learned * frames, {"frame": frames}

    def capture_sizes(self, tokens: int, frames: int) -> dict[Symbol, int]:
        return {**super().capture_sizes(tokens, frames), TOKENS: tokens}

    def encoder_tokens(self, placeholders: int) -> int:
        return self.merge**2 * placeholders


class PatchGenerator(nn.Module):
    """The first rows of blocks: a layer for images, one for tubelets, a table of positions, learned rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.image_width = 3 * config.rule.patch**2
        self.embedder = nn.Linear(self.image_width, config.width, bias=False)
        self.has_tubelets = config.rule.temporal > 1
        if self.has_tubelets:
            self.video_embedder = nn.Linear(config.rule.row_width, config.width, bias=False)
        self.pos_embed = nn.Parameter(torch.empty(1, config.table_side**2, config.width))
        self.cls_token = nn.ParameterDict({"token": nn.Parameter(torch.empty(config.learned, config.width))})
        self.side = config.table_side

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        patches = inputs["patches"]
        x_NC = self.embedder(patches[:, : self.image_width])
        if self.has_tubelets:
            # Rows of both kinds go through both layers: 0.2 % of the products of a tower of 32 blocks.
            x_NC = torch.where(inputs["tubelets"][:, None] > 0, self.video_embedder(patches), x_NC)
        x_NC = x_NC + self.places(inputs["places"]).to(x_NC.dtype)
        return torch.cat([self.cls_token["token"], x_NC]).index_select(0, inputs["rows"])

    def places(self, places_N3: Tensor) -> Tensor:
        """Stretch the table over a square as long as the frame's longer side, bilinear, in float32."""
        places_N3 = places_N3.float()
        # No clamp: TensorRT makes a ReLU of it, whose number is compared with that of the program.
        at_N2 = F.relu((places_N3[:, :2] + 0.5) * (self.side / places_N3[:, 2:]) - 0.5)
        return rows_between(self.pos_embed[0], self.side, at_N2)


class Tower(StagedTower):
    """The vision tower with pixel shuffle and projector."""

    connectors = ("mlp1",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.packing, unit = RadioPacking(config), config.rule.merge**2
        self.patch_generator = PatchGenerator(config)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.depth))
        norms = {"none": nn.Identity, "plain": PlainNorm, "stored": LayerNorm}
        self.vision_final_layernorm: nn.Module = norms[config.final_norm](config.width, eps=config.eps)
        self.mlp1 = nn.Sequential(
            RMSNorm(unit * config.width, PROJECTOR_EPS),
            nn.Linear(unit * config.width, config.projector_width, bias=False),
            SquaredRelu(),
            nn.Linear(config.projector_width, config.out_width, bias=False),
        )

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, CallLayout]:
        layout = CallLayout.of(inputs, self.packing.segmentations, self.packing.unit)
        return layout.arrange(self.patch_generator(inputs)), layout

    def finish(self, x: Tensor, layout: CallLayout) -> dict[str, Tensor]:
        merged = layout.inputs["merged"]
        x_NC = self.vision_final_layernorm(layout.restore(x).index_select(0, merged.flatten()))
        # Sizes are explicit because torch.export takes inferred ones for other than 1.
        return {"embeds": self.mlp1(x_NC.reshape(merged.shape[0], merged.shape[1] * x_NC.shape[-1]))}


class SquaredRelu(nn.Module):
    """The square of what is above zero."""

    def forward(self, x: Tensor) -> Tensor:
        above = F.relu(x)
        return above * above


class PlainNorm(nn.Module):
    """A layer norm without weights, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (self.width,), eps=self.eps).to(x.dtype)


class ScaledLinear(nn.Linear):
    """The last layer of a branch, scaled column by column."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows)
        self.lambda1 = nn.Parameter(torch.empty(rows))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.lambda1


def block(config: Config) -> Block:
    layer = Block(
        "frame",
        norms=[LayerNorm(config.width, eps=config.eps) for _ in range(2)],
        attention=FusedAttention(config.width, config.heads),
        mlp=GeluMlp(config.width, config.inner, exact=True),
    )
    if config.layer_scale:
        layer.attn.proj = ScaledLinear(config.width, config.width)
        layer.mlp.fc2 = ScaledLinear(config.inner, config.width)
    return layer


def stored_names(
    checkpoint: Checkpoint, config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, str]:
    names = {name: stored_name(name) for name in shapes}
    parts = (RADIO, PROJECTOR) if config.final_norm != "stored" else (RADIO, PROJECTOR, FINAL_NORM)
    return checkpoint.check_parts(names, shapes, dict.fromkeys(parts, ()))


def stored_name(name: str) -> str:
    for ours, place in (("attn.proj", 1), ("mlp.fc2", 2)):
        name = name.replace(f"{ours}.lambda1", f"layer_scale{place}.lambda1")
    return name if name.startswith((PROJECTOR, FINAL_NORM)) else RADIO + name


# Parts of names in released files, and what transformers calls them.
CLASS_NAMES = (
    ("radio_model.model.patch_generator.cls_token.token", "embeddings.cls_register_token"),
    ("radio_model.model.patch_generator.pos_embed", "embeddings.position_embedding"),
    ("radio_model.model.patch_generator.video_embedder", "embeddings.video_patch_projection"),
    ("radio_model.model.patch_generator.embedder", "embeddings.patch_projection"),
    ("radio_model.model.blocks", "encoder.layer"), ("attn.proj", "attention.o_proj"),
    ("mlp1.0.", "multi_modal_projector.layer_norm."), ("mlp1.1.", "multi_modal_projector.linear_1."),
    ("mlp1.3.", "multi_modal_projector.linear_2."),
)  # fmt: skip


# Settings of the class besides those of its parts, and of its decoder those that the tower depends on.
CLASS_SETTINGS = ("downsample_ratio", "projector_hidden_size", "vision_hidden_size", "vit_hidden_size")
DECODER = ("hidden_size", "num_nextn_predict_layers")


class ItemByItem:
    """The class of transformers in float32, one image or video at a time, without its decoder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            from transformers.models.nemotron_h_omni import configuration_nemotron_h_omni as settings
            from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni as classes
        except ImportError as error:
            raise UnsupportedError(
                "recipe 'nemotron_vl': the installed transformers has no nemotron_h_omni, which engines are "
                "checked against. Install a newer one: pip install --upgrade transformers."
            ) from error

        # Its decoder is made as well: one small layer stands for it.
        text = {
            name: value for name, value in section(checkpoint.view, "text_config").items() if name in DECODER
        }
        text |= {"model_type": "nemotron_h", "layers_block_type": ["mlp"], "vocab_size": 8}
        options: Any = {name: value for name, value in checkpoint.config.items() if name in CLASS_SETTINGS}
        vision: dict[str, Any] = dict(checkpoint.view.section("vision_config").items())
        vision["model_type"] = "radio"
        self.has_tubelets = (vision.get("video_temporal_patch_size") or 1) > 1
        if not self.has_tubelets:
            # Frames of videos are then images; the class makes a layer for tubelets all the same.
            vision |= {"video_temporal_patch_size": 2, **radio_sizes(vision.pop("args", None) or {})}
        options |= {"vision_config": vision, "text_config": text, "attn_implementation": "sdpa"}
        options["video_temporal_patch_size"] = vision["video_temporal_patch_size"]
        with torch.device("meta"):
            model: Any = classes.NemotronH_Omni_Reasoning_V3(
                settings.NemotronH_Omni_Reasoning_V3_Config(**options)
            )
        model.language_model = nn.Identity()
        state: dict[str, Tensor] = {
            name: torch.full(weight.shape, 0.0 if name.endswith("bias") else 1.0)
            for name, weight in model.state_dict().items()
            if name.startswith(FINAL_NORM) or ".layer_scale" in name or "video_patch" in name
        }
        state["vision_model.summary_idxs"] = torch.tensor(model.vision_model.config.summary_idxs)
        parts = (RADIO, PROJECTOR, *(part for part in (FINAL_NORM,) if model.vision_final_layernorm))
        names = [name for name in checkpoint.tensor_names() if name.startswith(parts)]
        for name, tensor in checkpoint.tensors(names, dtype="float32"):
            for ours, theirs in CLASS_NAMES:
                name = name.replace(ours, theirs)  # noqa: PLW2901
            if ".attn.qkv." in name:
                for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                    state[name.replace("attn.qkv", f"attention.{part}_proj")] = rows
            else:
                state[name] = tensor
        model.load_state_dict(state, strict=True, assign=True)
        self.module: nn.Module = model.eval()

    @torch.inference_mode()
    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        return {"embeds": torch.cat([self.tokens(item) for item in items])}

    def tokens(self, item: MediaItem) -> Tensor:
        model: Any = self.module
        vision = model.vision_model.config
        if item.kind == "image" or not self.has_tubelets:
            rows_NP, grids = item.patches[:, : vision.patch_dim], [item.grid[1:]] * item.grid[0]
            features = model.get_image_features(rows_NP, torch.tensor(grids)).pooler_output
            return torch.cat(list(features))
        split = item.patches.unflatten(-1, (-1, vision.num_channels, vision.patch_size, vision.patch_size))
        frames = split.unflatten(0, item.grid).permute(0, 3, 4, 1, 5, 2, 6)
        frames_TCHW = frames.flatten(5, 6).flatten(3, 4).flatten(0, 1)
        tokens_NC: Tensor = model.get_video_features(frames_TCHW).pooler_output.flatten(0, 1)
        return tokens_NC

    @torch.inference_mode()
    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        model: Any = self.module
        layers = model.vision_model.encoder.layer
        return with_blocks(layers, lambda: self.run(items), lambda rows: rows.flatten(0, 1))


def radio_sizes(args: Mapping[str, Any]) -> dict[str, int]:
    """Return numbers of RADIO's training as its class in transformers names them.

    https://github.com/NVlabs/RADIO: a class row for each teacher, registers up to a multiple of rows.
    """
    if not args:
        return {}
    apart, multiple = args.get("cls_token_per_teacher", True), args["register_multiple"]
    classes = len({teacher["name"] for teacher in args["teachers"]}) if apart else 1
    registers = multiple - classes % multiple if multiple else 0
    return {"num_cls_tokens": classes, "num_registers": registers, "max_img_size": args["cpe_max_size"]}


IMAGE, VIDEO, START, END = "<image>", "<video>", "<img>", "</img>"


def expand(config: Config, item: PromptItem) -> str:
    """Write an image as its tokens, a video as times and tokens of one tubelet after the other."""
    if item.kind == "image":
        return START + IMAGE * item.num_rows + END
    seconds, temporal, tubelets = item.item.frame_seconds, config.rule.temporal, item.item.grid[0]
    if -(-len(seconds) // temporal) != tubelets:
        raise InputError(
            f"video {item.number}: times of {len(seconds)} frames given, those of {tubelets} groups of "
            f"{temporal} expected: its prompt contains the time of each. Pass the frame rate as fps."
        )
    parts = []
    numbers = item.item.frame_numbers or range(tubelets)
    for group, (number, rows) in enumerate(zip(numbers, item.frame_rows, strict=True)):
        shown = enumerate(seconds[group * temporal : (group + 1) * temporal], start=number * temporal + 1)
        label = " and ".join(f"frame {number} sampled at {at:.2f} seconds" for number, at in shown)
        parts.append(f"F{label[1:]}: {START}{IMAGE * rows}{END}")
    return "\n".join(parts)


def text_model(checkpoint: Checkpoint) -> nn.Module:
    """Return the decoder of transformers, Mamba, attention and experts in turns, without weights."""
    from transformers import AutoConfig

    settings: Any = dict(section(checkpoint.view, "text_config").items())
    settings.pop("model_type", None)
    # An upper limit of infinity is no JSON and read as an object; the class does not use it.
    settings.pop("time_step_limit", None)
    return text_model_of(AutoConfig.for_model("nemotron_h", **settings))


LANGUAGE: LanguageRule[Config] = LanguageRule(
    build=text_model,
    prefixes=("language_model.backbone.",),
    heads=("language_model.lm_head.weight",),
    table="embeddings.weight",
    prompt=PromptRule(
        markers={"image": IMAGE, "video": VIDEO},
        slots={"image": IMAGE, "video": IMAGE},
        expand=expand,
        apart=True,
    ),
)
ORIGIN = "ours and the class in float64 differ by 2.9e-6, one token by 5.8e-6, on towers of 4 and 8 blocks"
BFLOAT16_ORIGIN = "twice the class's own bfloat16: off by 0.041, one token by 0.11, on the same towers"
FLOAT16_ORIGIN = "twice the class's own float16: off by 0.0058, one token by 0.012, on the same towers"

RECIPE = Recipe(
    name="nemotron_vl",
    summary="Nemotron-Nano-VL: RADIO on images, tiles and tubelets, pruning, Mamba in the decoder",
    model_types=("nemotron_h_omni", "NemotronH_Nano_VL_V2"),
    config=Config,
    packing=RadioPacking,
    modules=Tower,
    stored_names=stored_names,
    preprocess=preprocess,
    reference=ItemByItem,
    position_rule="linear",
    pruning_rule="evs",
    language=LANGUAGE,
    limits={
        "float32": Limit(relative_l2=1e-5, worst_token=5e-5, origin=ORIGIN),
        "bfloat16": Limit(relative_l2=0.085, worst_token=0.22, origin=BFLOAT16_ORIGIN),
        "float16": Limit(relative_l2=0.012, worst_token=0.025, origin=FLOAT16_ORIGIN),
    },
)
