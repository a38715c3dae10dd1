"""Kimi-VL against its published steps in PIL, and its prompts and decoder against transformers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from vlexport.recipes import kimi_vl
from vlexport.recipes.demo.kimi_vl import Tiny, contents
from vlexport.recipes.demo.writing import write_checkpoint

from tests.recipes.deepseek import text_model_of
from vlexport.checkpoint import Checkpoint
from vlexport.errors import LimitError, UnsupportedError
from vlexport.recipe import PromptItem, find_recipe
from vlexport.runtime.decoder import DecoderOptions, load_language
from vlexport.runtime.prompt import Prompter
from vlexport.runtime.request import Request, RequestLimits
from vlexport.runtime.tokenizer import CheckpointTokenizer
from vlexport.specs import NAMED_BOUNDS, Pixels
from vlexport.vision.preprocess import ResizeRule

RECIPE = find_recipe("kimi_vl")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = contents(Tiny(depth=1))
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("kimi") / "tiny", made, seed=0))


def published(image: Image.Image, patch: int, limit: int) -> tuple[int, int]:
    """Rows and columns of patches by the steps of the release's image processor, with PIL."""
    width, height = image.size
    patches = (width // patch) * (height // patch)
    if patches > limit:
        scale = math.sqrt(limit / patches)
        width, height = int(width * scale), int(height * scale)
    return -(-height // (2 * patch)) * 2, -(-width // (2 * patch)) * 2


def test_images_are_shrunk_filled_up_and_cut_as_published(tiny: Checkpoint) -> None:
    config = RECIPE.read_config(tiny)
    source, limit = random.Random(0), Tiny().most_patches
    for width, height in [(14, 14), (5, 300), (448, 448), (455, 462), (1000, 900), (2000, 260)]:
        raw = bytes(source.randrange(256) for _ in range(300))
        picture = Image.frombytes("RGB", (10, 10), raw).resize((width, height), Image.Resampling.BICUBIC)
        levels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        item = RECIPE.preprocess(config, Pixels(kind="image", frames=levels.reshape(1, height, width, 3)))
        assert item.grid == (1, *published(picture, 14, limit))
        patches = (width // 14) * (height // 14)
        if patches > limit:
            scale = math.sqrt(limit / patches)
            picture = picture.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
        black = Image.new("RGB", (item.grid[2] * 14, item.grid[1] * 14))
        black.paste(picture, (0, 0))
        levels = torch.frombuffer(bytearray(black.tobytes()), dtype=torch.uint8)
        wanted = (levels.reshape(item.grid[1], 14, item.grid[2], 14, 3) / 255 - 0.5) / 0.5
        wanted = wanted.permute(0, 2, 4, 1, 3).reshape(-1, 588)
        # A level of grey is 0.008; PIL resizes bytes in another order of the axes.
        torch.testing.assert_close(item.patches, wanted, rtol=0, atol=0.017)


@pytest.mark.parametrize("limit", [256, 4096, 16384])
def test_no_image_has_more_or_fewer_cells_than_its_profile(tiny: Checkpoint, limit: int) -> None:
    rule = replace(RECIPE.read_config(tiny).rule, image=ResizeRule(min_pixels=1, max_pixels=limit * 14**2))
    packing, source = kimi_vl.RasterPacking(rule), random.Random(0)
    for bounds in NAMED_BOUNDS.values():
        sizes = packing.sizes(bounds)
        # A pixel more than whole cells across, and as long as may be; then any.
        widths = [(28 * across + 1, bounds.max_pixels) for across in range(255)]
        for _ in range(2000):
            area = source.randint(1, bounds.max_pixels)
            widths.append((int(math.exp(source.uniform(0, math.log(area)))), area))
        for width, area in widths:
            height = max(1, min(area // width, 255 * 28))
            try:
                rows, columns = kimi_vl.resized(height, width, rule)
            except LimitError:
                continue
            cells = -(-rows // 28) * -(-columns // 28)
            if max(-(-rows // 28), -(-columns // 28)) <= 255:
                assert sizes.cells.min <= cells <= sizes.segments["frame"].length.max, (height, width)


def test_numbers_that_files_leave_out_are_those_of_the_published_code(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    for path in tiny.path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, left_out in (
        ("config.json", ("patch_size", "init_pos_emb_height", "init_pos_emb_width", "merge_kernel_size")),
        ("preprocessor_config.json", ("patch_size", "in_token_limit")),
    ):
        stored = json.loads((tmp_path / name).read_text())
        section = stored.get("vision_config", stored)
        (tmp_path / name).write_text(json.dumps(stored))
        for each in left_out:
            section.pop(each)
        (tmp_path / name).write_text(json.dumps(stored))
    config = RECIPE.read_config(Checkpoint.open(tmp_path))
    assert (config.table_sides, config.rule.patch, config.rule.merge) == ((64, 64), 14, 2)
    assert config.rule.image.max_pixels == 4096 * 14**2
    sizes = (config.depth, config.width, config.heads, config.inner, config.out_width)
    assert sizes == (1, 48, 3, 80, 64)


def test_a_prompt_has_a_slot_for_each_cell_between_the_words_of_its_template(tiny: Checkpoint) -> None:
    rule: Any = RECIPE.language.prompt if RECIPE.language else None
    config = RECIPE.read_config(tiny)
    made = Prompter(CheckpointTokenizer(tiny), rule, lambda item: rule.expand(config, item))
    images = [
        Pixels(kind="image", frames=torch.zeros(1, *sides, 3, dtype=torch.uint8))
        for sides in ((28, 56), (60, 28))
    ]
    marked = made.mark(Request(prompt="Compare.", images=images), RequestLimits())
    items = [RECIPE.preprocess(config, image) for image in images]
    counts = [RECIPE.num_tokens(config, item) for item in items]
    assert counts == [2, 3]
    given = [
        PromptItem(item=item, number=number, num_rows=counts[number]) for number, item in enumerate(items)
    ]
    found = made.expand(marked, given, RequestLimits())
    words = "".join(
        f"<|media_start|>image<|media_content|>{'<|media_pad|>' * n}<|media_end|>" for n in counts
    )
    system = "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
    wanted = (
        f"{system}<|im_user|>user<|im_middle|>{words}Compare.<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
    theirs = AutoTokenizer.from_pretrained(tiny.path)
    assert list(found.ids) == theirs(wanted, add_special_tokens=False).input_ids


def test_the_decoder_gives_the_logits_of_its_class_whole_and_in_chunks(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    assert RECIPE.language is not None
    model = text_model_of(tiny, tmp_path)
    assert model.config.rope_parameters["rope_theta"] == 800000.0
    decoder = load_language(tiny, RECIPE.language, DecoderOptions()).decoder
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model(input_ids=ids[None]).logits[0]
    embeds, positions = decoder.embed(ids), torch.arange(40)[None]
    for parts in ([40], [17, 23], [39, 1]):
        turn, start = decoder.begin(40), 0
        for count in parts:
            logits = turn.step(embeds[start : start + count], positions[:, start : start + count])
            start += count
            # Sums over other batch sizes; logits are up to 4.
            torch.testing.assert_close(logits, wanted[start - 1], rtol=0, atol=1e-5)


def test_a_decoder_of_experts_is_not_compiled(tiny: Checkpoint) -> None:
    assert RECIPE.language is not None
    with pytest.raises(UnsupportedError, match="chooses experts by its tokens"):
        load_language(tiny, RECIPE.language, DecoderOptions(compile=True))
