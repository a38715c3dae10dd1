"""Frames of pixels to rows of patches: resize, normalise, cut.

The resize works on uint8 (antialiased bicubic), because that is what the processors of the model
families do; a resize in floating point differs by up to 15 grey levels. It goes along rows first, as in
torchvision and Pillow up to 12.3; tests/reference/processors.py measures how far Pillow 13 is from that.
T frames, H rows, W columns, G groups of frames, P patch side.
Of rows: N patches, P values of a patch, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlexport.errors import CheckpointError, InputError, LimitError
from vlexport.specs import BYTES, PIXELS, MediaItem, Pixels

# The processors refuse anything longer; their resize rule has no answer there.
MAX_ASPECT = 200
# The bounds that transformers' processors take when a checkpoint names none.
IMAGE_PIXELS = (56 * 56, 28 * 28 * 1280)
VIDEO_PIXELS = (128 * 28 * 28, 28 * 28 * 768)
# Of frames x rows x columns, and tokens of a frame; of tokens of a video with the bounds above.
VOLUME_PIXELS, FRAME_TOKENS, VIDEO_TOKENS = (128 * 32 * 32, 32 * 32 * 768), 768, 128000
# Every smaller image is made this large, so this bounds what a small image takes.
MOST_MIN_PIXELS = 2**24
# What processors of transformers normalise by where a checkpoint names nothing: by family.
CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
HALVES = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
# Steps of processors that have no setting for them, in the words of those that have.
NO_SETTINGS = {
    "do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
}  # fmt: skip
RESAMPLE_MODES = {2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeRule:
    """Pixel bounds of one frame, or of all frames of a video together.

    video_tokens  a cap that the frames of a video share, or that holds for each where bounds are of all
    frames        how many frames the shortest video counts as, where bounds are of all frames together
    """

    min_pixels: int
    max_pixels: int
    resize: bool = True
    video_tokens: int | None = None
    frames: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= min(self.max_pixels, MOST_MIN_PIXELS):
            raise InputError(
                f"min_pixels {self.min_pixels} and max_pixels {self.max_pixels} given, 0 < min <= max and a "
                f"min of at most {MOST_MIN_PIXELS} expected."
            )

    @property
    def of_one_frame(self) -> ResizeRule:
        if self.frames is None:
            return self
        low, high = -(-self.min_pixels // self.frames), max(1, self.max_pixels // self.frames)
        return replace(self, min_pixels=min(low, high), max_pixels=high, frames=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelNormalisation:
    """Pixels of bytes: `(byte / divisor - mean) / std` by channel, in float32, on the host or in a tower."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    divisor: float = 1.0

    def normalise(self, levels: Tensor) -> Tensor:
        shape = (-1, *(1,) * (levels.ndim - 2))
        # By name: the default is of the process, and transformers changes it while it makes a model.
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=levels.device).reshape(shape)
            for values in (self.mean, self.std)
        )
        scaled = levels.float() if self.divisor == 1.0 else levels.float() / self.divisor
        return (scaled - mean) / std

    def pixels(self, rows_NP: Tensor) -> Tensor:
        # Cast before all else: of what is done to bytes, TensorRT knows that alone.
        return self.normalise(rows_NP.float().unflatten(1, (len(self.mean), -1))).flatten(1)

    def bytes_of(self, rows_NP: Tensor) -> Tensor:
        mean_C1, std_C1 = (
            torch.tensor(values, dtype=torch.float32)[:, None] for values in (self.mean, self.std)
        )
        levels = (rows_NP.unflatten(1, (len(self.mean), -1)) * std_C1 + mean_C1) * self.divisor
        rounded: Tensor = levels.flatten(1).round().clamp(0, 255).to(torch.uint8)
        return rounded


def first_rows(patches_NP: Tensor, levels: PixelNormalisation | None, layer: nn.Module) -> Tensor:
    """Return patches as a tower's first layer takes them; with levels they are bytes."""
    return patches_NP if levels is None else levels.pixels(patches_NP).to(next(layer.parameters()).dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchRule:
    """A family's way to turn frames into rows of patches; `input_dtype` is that of the rows."""

    patch: int
    merge: int
    temporal: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    resample: int
    image: ResizeRule
    video: ResizeRule
    input_dtype: str = PIXELS

    @property
    def row_width(self) -> int:
        return 3 * self.temporal * self.patch**2

    @property
    def levels(self) -> PixelNormalisation:
        """Divide in float32, as the processors do; on the CPU, also where a tower is made without memory."""
        settings = (
            torch.tensor(values, dtype=torch.float32, device="cpu") for values in (self.mean, self.std)
        )
        mean, std = ((values / self.rescale).tolist() for values in settings)
        return PixelNormalisation(mean=tuple(mean), std=tuple(std))


def check_patches(media: Sequence[MediaItem], row_width: int, unit: int = 1) -> None:
    """Refuse items whose rows do not match their grid or cells, or images with more than one frame."""
    for number, item in enumerate(media):
        rows = math.prod(item.grid) if item.cells is None else unit * len(item.cells)
        if tuple(item.patches.shape) != (rows, row_width):
            raise InputError(
                f"item {number}: patches of shape {list(item.patches.shape)} given, "
                f"[{rows}, {row_width}] expected for grid {list(item.grid)}."
            )
        if item.kind == "image" and item.grid[0] != 1:
            raise InputError(f"item {number}: an image has one frame, grid {list(item.grid)} given.")


def patch_rule(
    image: Mapping[str, Any],
    video: Mapping[str, Any],
    *,
    patch: int,
    merge: int,
    temporal: int,
) -> PatchRule:
    """Return the rule of a checkpoint, from the settings of its two processors; sizes come from the tower."""
    for name, size in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", temporal)):
        if image.get(name, size) != size:
            raise CheckpointError(
                f"processor settings: {name} {image[name]} given, but the tower has {size}. "
                "Check that preprocessor_config.json and config.json are of one checkpoint."
            )
    image, video = {**CLIP, **image}, {**CLIP, **video}
    mean, std, rescale, resample = normalisation(image)
    if normalisation(video) != (mean, std, rescale, resample):
        raise CheckpointError(
            "processor settings: images and videos are normalised or resampled differently; "
            "one way for both expected."
        )
    return PatchRule(
        patch=patch,
        merge=merge,
        temporal=temporal,
        mean=mean,
        std=std,
        rescale=rescale,
        resample=resample,
        image=resize_rule(image, IMAGE_PIXELS),
        video=resize_rule(video, VIDEO_PIXELS, VIDEO_TOKENS),
    )


def by_volume(rule: PatchRule, video: Mapping[str, Any]) -> PatchRule:
    """Return the rule with bounds of frames x rows x columns for videos, from their processor's settings."""
    return replace(rule, video=resize_rule(video, VOLUME_PIXELS, FRAME_TOKENS, rule.temporal))


def resize_rule(
    settings: Mapping[str, Any],
    pixels: tuple[int, int],
    tokens: int | None = None,
    frames: int | None = None,
) -> ResizeRule:
    """Return bounds from settings in either spelling, or defaults; `tokens` is that of a video's cap."""
    size = settings.get("size") or {}
    low = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or pixels[0]
    high = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or pixels[1]
    if not 0 < low <= high:
        raise CheckpointError(
            f"processor settings: min_pixels {low} and max_pixels {high} given, 0 < min <= max expected."
        )
    capped = tokens is not None and bool(settings.get("cap_pixels_per_frame"))
    return ResizeRule(
        min_pixels=int(low),
        max_pixels=int(high),
        resize=bool(settings.get("do_resize", True)),
        video_tokens=int(settings.get("max_video_tokens", tokens)) if capped else None,
        frames=frames,
    )


def normalisation(settings: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...], float, int]:
    """Return mean, standard deviation, scale and resampling filter of a processor's settings."""
    resample = int(settings.get("resample", 3))
    if resample not in RESAMPLE_MODES:
        raise CheckpointError(
            f"processor settings: resample {resample} given, 2 (bilinear) or 3 (bicubic) expected."
        )
    normalise = bool(settings.get("do_normalize", True))
    mean = settings.get("image_mean") if normalise else [0.0, 0.0, 0.0]
    std = settings.get("image_std") if normalise else [1.0, 1.0, 1.0]
    if not mean or not std or len(mean) != 3 or len(std) != 3:
        raise CheckpointError(
            f"processor settings: image_mean {mean} and image_std {std} given, three values each expected."
        )
    rescale = float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 1.0
    return tuple(map(float, mean)), tuple(map(float, std)), rescale, resample


def target_size(height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """Return sides that are multiples of `factor`, near the aspect ratio, with an area inside [low, high]."""
    return _fitted((height, width), factor, (low, high), 1, 1)


def volume_size(num_frames: int, height: int, width: int, factor: int, rule: ResizeRule) -> tuple[int, int]:
    """Return sides like those of `target_size` for all frames of a video together.

    They grow to a whole cell first. Frames count in groups, halves going to even numbers; a single frame,
    which transformers refuses, counts as the group that it is repeated to.
    """
    assert rule.frames is not None
    num_frames, scale = max(num_frames, rule.frames), factor / min(height, width)
    if scale > 1:
        height, width = int(height * scale), int(width * scale)
    high = rule.max_pixels
    if rule.video_tokens is not None:
        share = max(min(rule.video_tokens * factor**2, high // num_frames), int(rule.min_pixels * 1.05))
        high = share * num_frames
    whole = round(num_frames / rule.frames) * rule.frames
    return _fitted((height, width), factor, (rule.min_pixels, high), num_frames, whole)


def _fitted(
    sides: tuple[int, int], factor: int, bounds: tuple[int, int], num_frames: int, whole: int
) -> tuple[int, int]:
    """Return multiples of `factor` near both sides; `whole` frames have to be within the bounds."""
    (height, width), (low, high) = sides, bounds
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise LimitError(
            f"image of {width}x{height} pixels: sides of at most {MAX_ASPECT}:1 expected. Crop or pad it."
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if whole * rows * columns > high:
        shrink = math.sqrt(num_frames * height * width / high)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif whole * rows * columns < low:
        grow = math.sqrt(low / (num_frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return max(rows, factor), max(columns, factor)


def to_patches(rule: PatchRule, pixels: Pixels) -> MediaItem:
    """Resize, normalise unless bytes are wanted, and cut one item; an odd last frame is repeated."""
    frames_TCHW = _resize(rule, pixels)
    short = -len(frames_TCHW) % rule.temporal
    if short:
        frames_TCHW = torch.cat([frames_TCHW, frames_TCHW[-1:].expand(short, -1, -1, -1)])
    pixels_TCHW = frames_TCHW if rule.input_dtype == BYTES else rule.levels.normalise(frames_TCHW)
    down, across = (side // rule.patch for side in frames_TCHW.shape[2:])
    return MediaItem(
        kind=pixels.kind,
        patches=cut(pixels_TCHW, rule),
        grid=(len(frames_TCHW) // rule.temporal, down, across),
        seconds_per_grid=seconds_per_grid(pixels, rule.temporal),
        frame_seconds=frame_seconds(pixels, rule.temporal),
    )


def channels_first(pixels: Pixels) -> Tensor:
    """Return frames as [T, 3, H, W]; refuse what is not RGB bytes, and images of several frames."""
    frames_THWC = pixels.frames
    if frames_THWC.dtype != torch.uint8 or frames_THWC.ndim != 4 or frames_THWC.shape[-1] != 3:
        raise InputError(
            f"frames: {frames_THWC.dtype} {list(frames_THWC.shape)} given, "
            "uint8 [frames, height, width, 3] expected."
        )
    if frames_THWC.numel() == 0:
        raise InputError(
            f"frames: {list(frames_THWC.shape)} given, at least one pixel of one frame expected."
        )
    if pixels.kind == "image" and len(frames_THWC) != 1:
        raise InputError(f"an image has one frame, {len(frames_THWC)} given. Pass it as a video.")
    return frames_THWC.permute(0, 3, 1, 2)


def _resize(rule: PatchRule, pixels: Pixels) -> Tensor:
    frames_TCHW, factor = channels_first(pixels), rule.patch * rule.merge
    size: Any = pixels.size
    if size is None:
        size = resized_sides(rule, pixels.kind, len(frames_TCHW), *frames_TCHW.shape[2:])
    elif (
        not isinstance(size, tuple)
        or len(size) != 2
        or any(type(side) is not int or side < factor or side % factor for side in size)
    ):
        raise InputError(f"size: {size} given, rows and columns of pixels in multiples of {factor} expected.")
    if size == frames_TCHW.shape[2:]:
        return frames_TCHW
    rows, columns = size
    return resample(frames_TCHW, rows, columns, RESAMPLE_MODES[rule.resample])


def resized_sides(rule: PatchRule, kind: str, num_frames: int, height: int, width: int) -> tuple[int, int]:
    """Return rows and columns that so many frames of this size are resized to."""
    bounds = rule.image if kind == "image" else rule.video
    factor = rule.patch * rule.merge
    if not bounds.resize:
        if height % factor or width % factor:
            raise InputError(
                f"frames of {width}x{height} pixels: this checkpoint does not resize, "
                f"multiples of {factor} expected."
            )
        return height, width
    if bounds.frames is not None:
        return volume_size(num_frames, height, width, factor, bounds)
    high = bounds.max_pixels
    if bounds.video_tokens is not None:
        # nine tenths of the token budget, shared evenly by the groups of frames
        share = int(bounds.video_tokens * factor * factor * 0.9) * rule.temporal // num_frames
        high = max(min(high, share), int(bounds.min_pixels * 1.05))
    return target_size(height, width, factor, bounds.min_pixels, high)


def resample(frames_TCHW: Tensor, rows: int, columns: int, mode: str) -> Tensor:
    """Resize bytes, antialiased.

    Only the CPU has a kernel for bytes. Elsewhere its two passes are made through floats, with bytes in
    between, where sharp edges overshoot and are cut off. That gives the same within two grey levels.
    """
    if frames_TCHW.device.type == "cpu":
        whole = frames_TCHW.contiguous()
        return F.interpolate(whole, (rows, columns), mode=mode, antialias=True, align_corners=False)
    return resample_in_floats(frames_TCHW, rows, columns, mode)


def resample_in_floats(frames_TCHW: Tensor, rows: int, columns: int, mode: str) -> Tensor:
    """Resize along rows, then along columns, bytes after each pass."""
    for size in ((frames_TCHW.shape[2], columns), (rows, columns)):
        values = F.interpolate(frames_TCHW.float(), size, mode=mode, antialias=True, align_corners=False)
        frames_TCHW = values.round_().clamp_(0, 255).to(torch.uint8)
    return frames_TCHW


def cut(frames_TCHW: Tensor, rule: PatchRule) -> Tensor:
    """Cut frames into rows of (channel, time, y, x) cell by cell, in raster order inside a cell."""
    groups, merge, patch = len(frames_TCHW) // rule.temporal, rule.merge, rule.patch
    down, across = (side // (merge * patch) for side in frames_TCHW.shape[2:])
    split = frames_TCHW.reshape(groups, rule.temporal, 3, down, merge, patch, across, merge, patch)
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, rule.row_width)


def seconds_per_grid(pixels: Pixels, group: int) -> float | None:
    """Return the time between groups of frames as float32, widened: the value that models are given."""
    if pixels.kind != "video" or pixels.frames_per_second is None:
        return None
    return float(torch.tensor(group / pixels.frames_per_second, dtype=torch.float32))


def frame_seconds(pixels: Pixels, group: int) -> tuple[float, ...]:
    """Return the mean of the first and the last time of each group of frames; the last frame is repeated."""
    rate, times = pixels.frames_per_second, list(pixels.seconds)
    if pixels.kind != "video" or (rate is None and not times):
        return ()
    times = times or [(pixels.first + number) / rate for number in range(len(pixels.frames)) if rate]
    times += times[-1:] * (-len(times) % group)
    return tuple((times[at] + times[at + group - 1]) / 2 for at in range(0, len(times), group))


def most_cells(rule: ResizeRule, pixels: int, cell: int) -> int:
    """Return the most cells, `cell` pixels a side, of a frame of at most `pixels`; strips gain most."""
    if not rule.resize:
        return max(1, pixels // cell**2)
    if rule.frames is not None:
        # Thin strips are made a whole cell wide.
        return max(most_cells(rule.of_one_frame, pixels, cell), MAX_ASPECT)
    # A frame that is shrunk to less than a cell across is given a whole one again.
    strip = math.isqrt(MAX_ASPECT * rule.max_pixels) // cell if rule.max_pixels < MAX_ASPECT * cell**2 else 0
    most = max(rule.max_pixels // cell**2, strip)
    # A square of this area has more cells than a frame keeps, as has any larger one.
    pixels = min(pixels, (cell * (math.isqrt(most) + 1)) ** 2)
    rounded = max(_longest(pixels, cell, across) for across in range(1, math.isqrt(pixels) // cell + 2))
    return max(min(rounded, most), _grown(rule.min_pixels, cell))


def least_cells(rule: ResizeRule, pixels: int, cell: int) -> int:
    """Return a number of cells that no frame of at least `pixels` falls below."""
    if not rule.resize:
        return max(1, -(-pixels // cell**2))
    rule = rule.of_one_frame
    # Shrinking to the rule's largest area rounds both sides down, at most to half.
    area = min(pixels, rule.max_pixels // 4)
    plain = min(_shortest(area, cell, across) for across in range(1, math.isqrt(area) // cell + 2))
    # Thinner than half a cell, a strip rounds to nothing and grows to the rule's smallest area.
    grows = pixels <= MAX_ASPECT * (cell // 2) ** 2
    return min(plain, -(-rule.min_pixels // cell**2)) if grows else plain


def _longest(pixels: int, cell: int, across: int) -> int:
    """Return cells of the longest frame that is `across` cells wide and has at most `pixels`."""
    narrowest, widest = _rounds_to(across, cell), _rounds_to(across + 1, cell) - 1
    # Beyond this width the area ends the frame, below it the aspect does.
    turn = math.isqrt(pixels // MAX_ASPECT)
    sides = (min(max(side, narrowest), widest) for side in (turn, turn + 1))
    lengths = (min(pixels // side, MAX_ASPECT * side) for side in sides)
    return across * max(max(1, round(length / cell)) for length in lengths)


def _shortest(pixels: int, cell: int, across: int) -> int:
    widest = _rounds_to(across + 1, cell) - 1
    return across * max(1, round(-(-pixels // widest) / cell))


def _rounds_to(count: int, cell: int) -> int:
    side = -(-(2 * count - 1) * cell // 2)
    return side if round(side / cell) == count else side + 1


def _grown(area: int, cell: int) -> int:
    thinnest = math.sqrt(area / MAX_ASPECT)
    counts = []
    for across in range(1, math.isqrt(area) // cell + 2):
        side = max((across - 1) * cell, thinnest)
        if side <= across * cell:
            counts.append(across * math.ceil(area / side / cell))
    return max(counts)
