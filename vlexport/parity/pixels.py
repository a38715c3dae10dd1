"""L0 of preprocessing: sizes, patch order and normalisation pixel by pixel, the resize to one grey level.

T frames, H rows, W columns of pixels; nothing here shares code with what it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.parity.tables import Finding
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.preprocess import PatchRule

Preprocess = Callable[[Pixels], MediaItem]
BICUBIC = 3
# Two rounded passes of the resize: measured at most two grey levels, 0.004 on average.
# Sides above this take seconds to resize pixel by pixel.
MAX_EDGE = 400
LARGEST_STEP, MEAN_STEP = 2.01, 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Frames to preprocess, by their size."""

    kind: str
    frames: int
    height: int
    width: int
    rate: float | None = None

    def pixels(self, seed: int) -> Pixels:
        """Noise over slopes that differ by channel and frame."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.frames, self.height, self.width, 3)
        slope = (
            torch.linspace(0, 120, self.height)[None, :, None, None]
            + torch.linspace(60, 0, self.width)[None, None, :, None]
        )
        level = slope + 20.0 * torch.arange(3) + 7.0 * torch.arange(self.frames)[:, None, None, None]
        noise = torch.randint(0, 30, shape, generator=generator)
        frames = (level + noise).clamp(0, 255).to(torch.uint8)
        return Pixels(kind=self.kind, frames=frames, frames_per_second=self.rate)


def check_pixels(rule: PatchRule, preprocess: Preprocess, seed: int) -> list[Finding]:
    """Clips whose size stays, clips that are resized, odd frame counts, and the time between frames."""
    found: dict[str, list[str]] = {"media grids": [], "patch rows": [], "resized pixels": [], "seconds": []}
    for number, clip in enumerate(_clips(rule)):
        pixels = clip.pixels(seed + number)
        item = preprocess(pixels)
        sides = target_sides(rule, clip)
        groups = -(-clip.frames // rule.temporal)
        wanted = (groups, sides[0] // rule.patch, sides[1] // rule.patch)
        name = f"{clip.kind} {clip.frames}x{clip.height}x{clip.width}"
        if item.grid != wanted:
            found["media grids"].append(f"{name}: {item.grid}, not {wanted}")
            continue
        table = "patch rows" if sides == (clip.height, clip.width) else "resized pixels"
        if not _agrees(item.patches, patch_rows(rule, pixels.frames, sides), rule, table):
            found[table].append(name)
        seconds = None if clip.rate is None or clip.kind == "image" else _float32(rule.temporal / clip.rate)
        if item.seconds_per_grid != seconds:
            found["seconds"].append(f"{name}: {item.seconds_per_grid}, not {seconds}")
    return [
        Finding(table=table, wrong=len(faults), first=faults[0] if faults else "")
        for table, faults in found.items()
    ]


def _clips(rule: PatchRule) -> list[Clip]:
    unit = rule.patch * rule.merge
    side = max(2, math.isqrt(max(rule.image.min_pixels, rule.video.min_pixels) // unit**2) + 1)
    tall, wide = unit * side, unit * (side + 1)
    clips = [
        Clip(kind="image", frames=1, height=tall, width=wide),
        Clip(kind="video", frames=2 * rule.temporal - 1, height=wide, width=tall, rate=3.0),
        Clip(kind="video", frames=rule.temporal, height=tall, width=tall, rate=None),
    ]
    if rule.image.resize:
        clips += [
            Clip(kind="image", frames=1, height=tall + unit // 3, width=2 * wide - unit // 4),
            Clip(kind="image", frames=1, height=tall + unit - unit // 4, width=wide + unit // 3),
            Clip(kind="image", frames=1, height=unit // 2, width=unit + 5),
        ]
    if rule.video.resize:
        clips.append(Clip(kind="video", frames=rule.temporal, height=tall + 9, width=wide - 11, rate=2.0))
    for kind, bounds in (("image", rule.image), ("video", rule.video)):
        clips += [
            Clip(kind=kind, frames=1 if kind == "image" else rule.temporal, height=edge, width=edge + 3)
            for edge in (math.isqrt(bounds.min_pixels) * 2 // 3, math.isqrt(bounds.max_pixels) * 4 // 3)
            if bounds.resize and unit // 4 < edge < MAX_EDGE
        ]
    return clips


def target_sides(rule: PatchRule, clip: Clip) -> tuple[int, int]:
    """Height and width after the resize: multiples of a cell, area within bounds."""
    bounds = rule.image if clip.kind == "image" else rule.video
    if not bounds.resize:
        return clip.height, clip.width
    unit, high = rule.patch * rule.merge, bounds.max_pixels
    if bounds.video_tokens is not None and clip.kind == "video":
        share = int(bounds.video_tokens * unit * unit * 0.9) * rule.temporal // clip.frames
        high = max(min(high, share), int(bounds.min_pixels * 1.05))
    sides = [round(side / unit) * unit for side in (clip.height, clip.width)]
    if math.prod(sides) > high:
        factor = math.sqrt(clip.height * clip.width / high)
        sides = [math.floor(side / factor / unit) * unit for side in (clip.height, clip.width)]
    elif math.prod(sides) < bounds.min_pixels:
        factor = math.sqrt(bounds.min_pixels / (clip.height * clip.width))
        sides = [math.ceil(side * factor / unit) * unit for side in (clip.height, clip.width)]
    return max(sides[0], unit), max(sides[1], unit)


def patch_rows(rule: PatchRule, frames_THWC: Tensor, sides: tuple[int, int]) -> Tensor:
    """Rows of normalised patches: frames, cells, patches of a cell, then channel, time, row and column."""
    values = frames_THWC.double()
    values = resized(values, sides, rule.resample) if sides != tuple(values.shape[1:3]) else values
    frames = list(values)
    while len(frames) % rule.temporal:
        frames.append(frames[-1])
    mean, std = torch.tensor(rule.mean).double(), torch.tensor(rule.std).double()
    rows: list[Tensor] = []
    for group in range(0, len(frames), rule.temporal):
        clip_THWC = torch.stack(frames[group : group + rule.temporal]) * rule.rescale
        clip_THWC = (clip_THWC - mean) / std
        for top, left in _corners(rule, sides):
            patch = clip_THWC[:, top : top + rule.patch, left : left + rule.patch]
            rows.append(torch.cat([patch[..., channel].flatten() for channel in range(3)]))
    return torch.stack(rows)


def _corners(rule: PatchRule, sides: tuple[int, int]) -> Sequence[tuple[int, int]]:
    unit = rule.patch * rule.merge
    return [
        (top + down * rule.patch, left + across * rule.patch)
        for top in range(0, sides[0], unit)
        for left in range(0, sides[1], unit)
        for down in range(rule.merge)
        for across in range(rule.merge)
    ]


def _agrees(given: Tensor, wanted: Tensor, rule: PatchRule, table: str) -> bool:
    if given.shape != wanted.shape:
        return False
    level = torch.tensor(rule.rescale) / torch.tensor(rule.std)
    per_channel = level.repeat_interleave(given.shape[1] // 3).double()
    steps = (given.double() - wanted).abs() / per_channel
    if table == "patch rows":
        # Normalisation in float32 rounds to 5e-7; a grey level is about 0.015.
        return bool(steps.max() < 1e-3)
    return bool(steps.max() <= LARGEST_STEP and steps.mean() <= MEAN_STEP)


def resized(values_THWC: Tensor, sides: tuple[int, int], resample: int) -> Tensor:
    """Separable filter stretched over the reduction, columns first, bytes after each pass."""
    across = _weights(values_THWC.shape[2], sides[1], resample)
    down = _weights(values_THWC.shape[1], sides[0], resample)
    first = torch.einsum("thwc,xw->thxc", values_THWC, across).round().clamp(0, 255)
    return torch.einsum("thxc,yh->tyxc", first, down).round().clamp(0, 255)


def _weights(size: int, target: int, resample: int) -> Tensor:
    scale = size / target
    stretch, reach = max(scale, 1.0), 2.0 if resample == BICUBIC else 1.0
    centres, places = ((torch.arange(count, dtype=torch.float64) + 0.5) for count in (target, size))
    distance = (places[None] - scale * centres[:, None]).abs() / stretch
    rows = torch.where(distance < reach, _kernel(distance, resample), 0.0)
    return rows / rows.sum(-1, keepdim=True)


def _kernel(distance: Tensor, resample: int) -> Tensor:
    if resample != BICUBIC:
        return (1.0 - distance).clamp(min=0.0)
    near = (1.5 * distance - 2.5) * distance**2 + 1.0
    far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    return torch.where(distance < 1.0, near, far)


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
