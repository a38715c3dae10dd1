"""A contact sheet of what pruning kept: every frame that has tokens, dropped cells dimmed, with a legend.

A frame is resized so that each token is a square of whole pixels; the mask is exact to the pixel. A picture
is drawn larger than a frame of a film, so that a page can be read.
T frames of the grid, H rows and W columns of a picture in pixels, R rows and C columns of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.errors import InputError, UnsupportedError
from vlexport.runtime.outputs import Answer, MediaReport, provenance, writing
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.preprocess import read_pixels
from vlexport.runtime.request import Request
from vlexport.specs import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont
    from torch import Tensor

PAPER, INK, FAINT, BAR = (22, 24, 29), (232, 234, 238), (138, 144, 155), (94, 196, 148)
TILE_WIDTH, TILE_HEIGHT, SHEET_WIDTH, GAP, CAPTION, TITLE = 224, 336, 1440, 16, 30, 36
# A picture alone: so many times as large, while a token takes no more pixels than its cell has.
PICTURE_SCALE, PICTURE_SIDE = 3, 28
# Room for the longest caption: a narrow tile gets as much.
LEAST_WIDTH = 132
BAR_HEIGHT = 4
# Dropped cells keep a fifth of their light, without colour, on the paper's own.
DIM = 5
# What the signs below the films mean; the first two cells are drawn as tiles are.
LEGEND = ("kept token", "dropped token", "share of the frame's tokens that were kept")
LEGEND_HEIGHT, SAMPLE, SAMPLE_WIDTH = 22, (222, 158, 84), 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Film:
    """One image or video: bytes [frames, H, W, 3], and which tokens of its grid were kept [T, R, C]."""

    title: str
    frames: Tensor
    kept: Tensor
    seconds_per_grid: float | None = None

    def __post_init__(self) -> None:
        if self.kept.ndim != 3 or self.frames.ndim != 4 or not self.kept.numel() or not self.frames.numel():
            raise InputError(
                f"{self.title}: frames {list(self.frames.shape)} and mask {list(self.kept.shape)} given; "
                "[frames, height, width, 3] and [grid frames, rows, columns] expected."
            )

    def frame(self, index: int) -> Tensor:
        per_grid_frame = math.ceil(len(self.frames) / len(self.kept))
        return self.frames[min(index * per_grid_frame, len(self.frames) - 1)]


def write_sheet(out: Path, answer: Answer, request: Request, pipeline: Pipeline) -> None:
    """Draw the request's images and videos, read once more; PNG texts name bundle, rule, rate and media."""
    from PIL.PngImagePlugin import PngInfo

    bounds = pipeline.options.limits.media
    images, videos = (
        [read_pixels(kind, source, request.fps, bounds) for source in request.sources(kind)]
        for kind in ("image", "video")
    )
    given = (request.prune, request.method, request.prune_before)
    pruning = pipeline.pruner.plan(*given, has_question=True)
    rules = {kind: pipeline.pruner.rule_of(pruning, kind) for kind in {item.kind for item in answer.media}}
    merge = pipeline.recipe.merge(pipeline.config)
    sheet = contact_sheet(films_of(answer.media, images, videos, merge, rules))
    written = PngInfo()
    names = [getattr(source, "name", "") for kind in ("image", "video") for source in request.sources(kind)]
    rule = "; ".join(sorted(set(filter(None, rules.values()))))
    entries = {"pruning": rule or "none", "media": ", ".join(filter(None, names))}
    for key, value in (provenance(pipeline.bundle) | entries).items():
        written.add_itxt(key, value)
    with writing(out, "--overlay") as temporary:
        sheet.save(temporary, format="PNG", pnginfo=written)


def films_of(
    media: Sequence[MediaReport],
    images: Sequence[Pixels],
    videos: Sequence[Pixels],
    merge: int,
    rules: Mapping[str, str],
) -> list[Film]:
    """Return an answer's media with their pixels in prompt order; `rules` by kind are for titles."""
    import torch

    sources = {"image": iter(images), "video": iter(videos)}
    films = []
    for item in media:
        rule = rules.get(item.kind, "")
        shape = (item.grid[0], item.grid[1] // merge, item.grid[2] // merge)
        if item.mask is None:
            how, kept = "not pruned", torch.ones(shape, dtype=torch.bool)
        elif item.mask.numel() == math.prod(shape):
            how, kept = f"pruned by {rule}" if rule else "pruned", item.mask.reshape(shape)
        else:
            raise UnsupportedError(
                f"overlay: {item.num_tokens} tokens of the {item.kind} are no grid of {shape}, so what they "
                "show is not known. Leave overlay out."
            )
        films.append(
            Film(
                title=f"{item.kind}: {item.num_kept} of {item.num_tokens} tokens kept, "
                f"{item.num_kept / item.num_tokens:.0%} ({how})",
                frames=next(sources[item.kind]).frames,
                kept=kept,
                seconds_per_grid=item.seconds_per_grid,
            )
        )
    return films


def cell_side(frames: int, rows: int, columns: int) -> int:
    """Return whole pixels of a token's square, near a usual tile's width; no tile is much taller."""
    side = min(TILE_WIDTH / columns, TILE_HEIGHT / rows)
    if frames == 1:
        side = max(side, min(PICTURE_SCALE * side, PICTURE_SIDE))
    return max(2, round(side))


def tile(frame: Tensor, kept_RC: Tensor, side: int) -> Image:
    """Draw a frame with the cells of dropped tokens dimmed; kept cells are the resized frame itself."""
    import numpy as np
    import PIL.Image

    size = (kept_RC.shape[1] * side, kept_RC.shape[0] * side)
    whole = PIL.Image.fromarray(frame.numpy()).resize(size, PIL.Image.Resampling.LANCZOS)
    grey_HW = np.asarray(whole.convert("L"))[..., None] // DIM
    dimmed_HWC = (grey_HW + np.asarray(PAPER)).astype(np.uint8)
    shown_HW = kept_RC.numpy().repeat(side, axis=0).repeat(side, axis=1)
    return PIL.Image.fromarray(np.where(shown_HW[..., None], np.asarray(whole), dimmed_HWC))


def contact_sheet(films: Sequence[Film]) -> Image:
    """Draw all films below each other, on one sheet, and the legend."""
    import PIL.Image

    if not films:
        raise InputError("overlay: no image or video in the prompt, so there is nothing to show.")
    blocks = [*(_block(film) for film in films), _legend()]
    width = max(block.width for block in blocks) + 2 * GAP
    height = sum(block.height + GAP for block in blocks) + GAP
    sheet = PIL.Image.new("RGB", (width, height), PAPER)
    top = GAP
    for block in blocks:
        sheet.paste(block, (GAP, top))
        top += block.height + GAP
    return sheet


def _legend() -> Image:
    import numpy as np
    import PIL.Image
    from PIL.ImageDraw import Draw

    font = _font(12)
    wide = [GAP // 2 + int(font.getlength(words)) + 1 + GAP for words in LEGEND]
    block = PIL.Image.new("RGB", (len(LEGEND) * SAMPLE_WIDTH + sum(wide), LEGEND_HEIGHT), PAPER)
    pen = Draw(block)
    grey = int(np.asarray(PIL.Image.new("RGB", (1, 1), SAMPLE).convert("L"))[0, 0])
    dimmed = tuple(grey // DIM + channel for channel in PAPER)
    left = 0
    for words, colour, room in zip(LEGEND, (SAMPLE, dimmed, BAR), wide, strict=True):
        low, high = (8, 8 + BAR_HEIGHT - 1) if colour == BAR else (3, 3 + SAMPLE_WIDTH - 1)
        pen.rectangle((left, low, left + SAMPLE_WIDTH - 1, high), fill=colour)
        pen.text((left + SAMPLE_WIDTH + GAP // 2, 3), words, fill=FAINT, font=font)
        left += SAMPLE_WIDTH + room
    return block


def tile_places(film: Film) -> list[tuple[int, int]]:
    """Return left upper corner of each tile inside the film's block."""
    _, rows, columns = film.kept.shape
    side = cell_side(*film.kept.shape)
    width = max(columns * side, LEAST_WIDTH)
    per_row = max(1, (SHEET_WIDTH - 2 * GAP + GAP) // (width + GAP))
    step = (width + GAP, rows * side + CAPTION + GAP)
    return [
        (index % per_row * step[0], TITLE + index // per_row * step[1]) for index in range(len(film.kept))
    ]


def _block(film: Film) -> Image:
    import PIL.Image
    from PIL.ImageDraw import Draw

    places = tile_places(film)
    side = cell_side(*film.kept.shape)
    tiles = [tile(film.frame(index), kept_RC, side) for index, kept_RC in enumerate(film.kept)]
    title_width = int(_font(16).getlength(film.title)) + 1
    room = max(tiles[0].width, LEAST_WIDTH)
    width = max(title_width, max(left for left, _ in places) + room)
    height = max(top for _, top in places) + tiles[0].height + CAPTION
    block = PIL.Image.new("RGB", (width, height), PAPER)
    pen = Draw(block)
    pen.text((0, 4), film.title, fill=INK, font=_font(16))
    for index, (left, top) in enumerate(places):
        block.paste(tiles[index], (left, top))
        _caption(pen, film, index, (left, top + tiles[index].height, room))
    return block


def _caption(pen: ImageDraw, film: Film, index: int, place: tuple[int, int, int]) -> None:
    left, top, width = place
    kept, total = int(film.kept[index].sum()), film.kept[index].numel()
    pen.rectangle((left, top + 2, left + width - 1, top + 1 + BAR_HEIGHT), fill=(48, 52, 60))
    if kept:
        pen.rectangle((left, top + 2, left + round(width * kept / total) - 1, top + 1 + BAR_HEIGHT), fill=BAR)
    name = f"{index + 1}"
    if film.seconds_per_grid is not None:
        name = f"{index * film.seconds_per_grid:.1f} s"
    font = _font(12)
    pen.text((left, top + 9), name, fill=FAINT, font=font)
    share = f"{kept}/{total}  {kept / total:.0%}"
    pen.text((left + width - font.getlength(share), top + 9), share, fill=INK, font=font)


def _font(size: int) -> FreeTypeFont | ImageFont:
    from PIL.ImageFont import load_default

    return load_default(size)
