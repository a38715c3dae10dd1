"""Videos and prompts of Qwen3-VL by transformers' own processors: sizes by volume, times of frames, texts."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer
from transformers.video_utils import VideoMetadata
from vlexport.recipes.demo.qwen3_vl import Tiny, contents, processor_json
from vlexport.recipes.demo.writing import write_checkpoint

from tests.golden_data import FOLDER
from tests.reference.processors import their_video, video_class
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import PromptItem, recipe_for
from vlexport.runtime.prompt import Prompter
from vlexport.runtime.request import Request, RequestLimits
from vlexport.runtime.tokenizer import CheckpointTokenizer
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.preprocess import ResizeRule, least_cells, most_cells, resize_rule, volume_size

FAMILY = "qwen3_vl"
# One kernel on both sides, float32 against float64 normalisation.
SAME_PIXELS = 1e-5
UNIT = 32 * 32
BOUNDS: dict[str, dict[str, Any]] = {
    "large": {"size": {"shortest_edge": 4096, "longest_edge": 96 * UNIT}},
    "grown": {"size": {"shortest_edge": 40 * UNIT, "longest_edge": 96 * UNIT}},
    "shrunk": {"size": {"shortest_edge": UNIT, "longest_edge": 14 * UNIT}},
    "capped": {
        "size": {"shortest_edge": UNIT, "longest_edge": 96 * UNIT},
        "cap_pixels_per_frame": True,
        "max_video_tokens": 3,
    },
    "capped by default tokens": {
        "size": {"shortest_edge": UNIT, "longest_edge": 96 * UNIT},
        "cap_pixels_per_frame": True,
    },
    "cap given and off": {
        "size": {"shortest_edge": UNIT, "longest_edge": 96 * UNIT},
        "cap_pixels_per_frame": False,
        "max_video_tokens": 3,
    },
}
# Frames, height and width: odd counts round to even, sides below one cell grow first.
FILMS = ((2, 64, 96), (3, 40, 130), (5, 20, 45), (7, 100, 31), (6, 190, 60), (4, 10, 300))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    tiny = Tiny(depth=1, levels=(0,), with_decoder=False)
    return Checkpoint.open(
        write_checkpoint(tmp_path_factory.mktemp("words") / "tiny", contents(tiny), seed=0)
    )


@pytest.mark.parametrize("name", BOUNDS)
def test_videos_are_those_of_their_processor(name: str, checkpoint: Checkpoint, tmp_path) -> None:
    settings = {**processor_json("video"), **BOUNDS[name]}
    copy = shutil.copytree(checkpoint.path, tmp_path / "copy")
    (copy / "video_preprocessor_config.json").write_text(json.dumps(settings))
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(Checkpoint.open(copy))
    for frames, height, width in FILMS:
        source = torch.Generator().manual_seed(frames)
        film = torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8, generator=source)
        grid, patches = their_video(settings, film, FAMILY)
        item = recipe.preprocess(config, Pixels(kind="video", frames=film, frames_per_second=2.0))
        assert list(item.grid) == [int(each) for each in grid], (frames, height, width)
        torch.testing.assert_close(item.patches.double(), patches.double(), rtol=0, atol=SAME_PIXELS)


def test_bounds_that_are_left_out_are_their_defaults() -> None:
    theirs = video_class(FAMILY)()
    config = resize_rule({"cap_pixels_per_frame": True}, (128 * UNIT, 768 * UNIT), 768, 2)
    found = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    assert (found, config.video_tokens) == (theirs.size, theirs.max_video_tokens)


def test_sizes_by_volume_are_theirs() -> None:
    smart_resize = video_class(FAMILY).resize.__globals__["smart_resize"]
    draw = random.Random(0)
    for _ in range(3000):
        frames, height, width = draw.randint(2, 40), draw.randint(8, 700), draw.randint(8, 700)
        low = draw.choice((UNIT, 128 * UNIT))
        rule = ResizeRule(min_pixels=low, max_pixels=draw.choice((400, 24576)) * UNIT, frames=2)
        theirs = smart_resize(
            frames, height, width, 2, 32, min_pixels=rule.min_pixels, max_pixels=rule.max_pixels
        )
        assert volume_size(frames, height, width, 32, rule) == theirs, (frames, height, width)


def test_no_video_has_more_or_fewer_tokens_than_its_profile_counts() -> None:
    draw, cell = random.Random(1), 32
    for _ in range(4000):
        frames, height = draw.choice((1, 2, 3, 4, 5, 9, 40)), draw.randint(1, 600)
        width = draw.randint(max(1, -(-height // 190)), min(600, 190 * height))
        low, high = draw.choice(((1, 4), (40, 96), (4, 24576), (300, 301)))
        rule = ResizeRule(min_pixels=low * UNIT, max_pixels=high * UNIT, frames=2)
        rows, columns = volume_size(frames, height, width, cell, rule)
        area, groups, found = height * width, -(-frames // 2), rows * columns // cell**2
        assert found <= most_cells(rule, area, cell), (frames, height, width, rule)
        assert groups * found >= least_cells(rule, area, cell), (frames, height, width, rule)


def test_the_table_of_a_half_precision_tower_is_resized_in_float32(checkpoint: Checkpoint) -> None:
    """Rounded shares are lost in the noise of a tower, and add to it."""
    recipe: Any = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    items = [recipe.item(config, "image", (1, 14, 22), torch.zeros(14 * 22, recipe.row_width(config)))]
    tables = recipe.prepare(config, items, "grouped")
    half, whole = recipe.tower(checkpoint, "bfloat16"), recipe.tower(checkpoint, "float32")
    whole.pos_embed.weight.data = half.pos_embed.weight.data.float()
    found, wanted = (each.places(tables["positions"], tables["sides"]) for each in (half, whole))
    assert torch.equal(found, wanted)


RATES = (2.0, 24.0, 29.97, 1 / 3, 7.5)


def media(kind: str, number: int) -> Pixels:
    """Sizes, lengths and rates differ; every second video is sampled from a longer one."""
    if kind == "image":
        return Pixels(kind=kind, frames=torch.zeros((1, 64 + 32 * number, 96, 3), dtype=torch.uint8))
    frames, rate = torch.zeros((3 + number, 64, 96 + 32 * number, 3), dtype=torch.uint8), RATES[number]
    seconds = tuple(at * 5 / rate for at in range(len(frames))) if number % 2 else ()
    return Pixels(kind=kind, frames=frames, frames_per_second=rate, seconds=seconds)


def their_text(item: MediaItem, pixels: Pixels) -> str:
    """Return what their processor writes in place of the token of one item."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    theirs: Any = SimpleNamespace(
        image_processor=sizes,
        video_processor=sizes,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, cast("Any", None)),
    )
    grids = torch.tensor([item.grid])
    if item.kind == "image":
        return Qwen3VLProcessor.replace_image_token(theirs, {"image_grid_thw": grids}, 0)
    step = 5 if pixels.seconds else 1
    indices = [at * step for at in range(len(pixels.frames))]
    about = VideoMetadata(total_num_frames=100, fps=pixels.frames_per_second, frames_indices=indices)
    return Qwen3VLProcessor.replace_video_token(
        theirs, {"video_grid_thw": grids, "video_metadata": [about]}, 0
    )


def room_for(item: MediaItem, number: int, rows: int) -> PromptItem:
    """An item of a prompt that is not pruned."""
    frames = item.grid[0]
    each = (rows // frames,) * frames
    return PromptItem(item=item, number=number, num_rows=rows, count_frames=lambda: each)


ORDERS = (["image"], ["video"], ["video", "image"], ["image", "video", "image"], ["video", "video", "image"])


@pytest.mark.parametrize("layout", [None, "bare"])
@pytest.mark.parametrize("kinds", ORDERS, ids="-".join)
def test_ids_are_those_of_their_processor(
    checkpoint: Checkpoint, kinds: list[str], layout: str | None
) -> None:
    """Its text for each item; a `bare` one, as older releases wrote it, has no markers round all frames."""
    recipe = recipe_for(checkpoint)
    config, language = recipe.read_config(checkpoint), recipe.language
    assert language is not None
    rule = language.prompt_of(layout)
    made = Prompter(CheckpointTokenizer(checkpoint), rule, lambda item: rule.expand(config, item))
    pixels = [media(kind, kinds[:at].count(kind)) for at, kind in enumerate(kinds)]
    texts = [
        part for kind in kinds for part in (f"a {kind}:", f"<|vision_start|><|{kind}_pad|><|vision_end|>")
    ]
    request = Request(
        raw_prompt="".join(texts) + "what?",
        images=[each for each in pixels if each.kind == "image"],
        videos=[each for each in pixels if each.kind == "video"],
    )
    marked = made.mark(request, RequestLimits())
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.path)
    items, wanted, rooms = list[PromptItem](), list[int](), list[tuple[int, int]]()
    for kind, given in zip(kinds, pixels, strict=True):
        item = recipe.preprocess(config, given)
        number = sum(each.kind == kind for each in items)
        items.append(room_for(item, number, recipe.num_tokens(config, item)))
        outer = kind == "image" or layout is None
        before, after = ("<|vision_start|>", "<|vision_end|>") if outer else ("", "")
        # Tokenised by itself, whatever stands around it.
        wanted += tokenizer(f"a {kind}:{before}", add_special_tokens=False)["input_ids"]
        own = tokenizer(their_text(item, given), add_special_tokens=False)["input_ids"]
        rooms.append((len(wanted), len(own)))
        wanted += own + tokenizer(after, add_special_tokens=False)["input_ids"]
    wanted += tokenizer("what?", add_special_tokens=False)["input_ids"]
    found = made.expand(marked, items, RequestLimits())
    assert list(found.ids) == wanted
    assert [(room.offset, room.length) for room in found.placeholders] == rooms
    assert [room.num_embeds for room in found.placeholders] == [item.num_rows for item in items]


def test_an_items_text_never_merges_with_its_neighbours() -> None:
    """The recorded tokenizer has merges; text before the first timestamp would take its first sign in."""
    merging = Checkpoint.open(FOLDER / "e2e_qwen3_vl" / "checkpoint")
    recipe = recipe_for(merging)
    config, language = recipe.read_config(merging), recipe.language
    assert language is not None
    rule, tokenizer = language.prompt_of("bare"), CheckpointTokenizer(merging)
    made = Prompter(tokenizer, rule, lambda item: rule.expand(config, item))
    film = torch.zeros((4, 32, 32, 3), dtype=torch.uint8)
    pixels = Pixels(kind="video", frames=film, frames_per_second=2.0)
    item = recipe.preprocess(config, pixels)
    for before in ("seconds", "<", "0.", "the video ", "\n"):
        text = f"{before}<|vision_start|><|video_pad|><|vision_end|>seconds"
        marked = made.mark(Request(raw_prompt=text, videos=[pixels]), RequestLimits())
        known = room_for(item, 0, recipe.num_tokens(config, item))
        found = made.expand(marked, [known], RequestLimits())
        parts = (before, rule.expand(config, known), "seconds")
        apart = [token for part in parts for token in tokenizer.encode(part, add_special=False).ids]
        assert list(found.ids) == apart
