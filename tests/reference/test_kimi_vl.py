"""Kimi-VL: recorded towers, its published steps in PIL, prompts and decoder of transformers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoTokenizer
from vlexport.recipes import kimi_vl
from vlexport.recipes.demo.kimi_vl import Tiny, contents, processor_json
from vlexport.recipes.demo.writing import write_checkpoint

from tests.golden_data import counted
from vlexport.checkpoint import Checkpoint
from vlexport.errors import LimitError
from vlexport.recipe import PromptItem, find_recipe
from vlexport.runtime.prompt import Prompter
from vlexport.runtime.request import Request, RequestLimits
from vlexport.runtime.tokenizer import CheckpointTokenizer
from vlexport.specs import NAMED_BOUNDS, MediaItem, Pixels
from vlexport.vision.attention.layout import LAYOUTS
from vlexport.vision.preprocess import ResizeRule

RECIPE = find_recipe("kimi_vl")
# The recorded float32 tower and ours differ by 7.2e-7 on these, the reference by 8.4e-7.
NEAR = 1e-5


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


def test_numbers_that_files_leave_out_are_those_of_the_published_code(tiny, tmp_path):
    for path in tiny.path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, left_out in (
        ("config.json", ("patch_size", "init_pos_emb_height", "init_pos_emb_width", "merge_kernel_size")),
        ("preprocessor_config.json", ("patch_size", "in_token_limit")),
    ):
        stored = json.loads((tmp_path / name).read_text())
        section = stored.get("vision_config", stored)
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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The tower of the recorded runs, which end before the projector, with any projector."""
    (case,) = counted("moonvit", "weights", number=1)
    folder = tmp_path_factory.mktemp("recorded")
    vision = case.meta["config"]
    config = {"model_type": "kimi_vl", "vision_config": vision, "text_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {**processor_json(Tiny()), "patch_size": vision["patch_size"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    wide = 4 * vision["hidden_size"]
    shapes = {"linear_1": (wide, wide), "linear_2": (8, wide)}
    projector = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    projector |= {f"{name}.bias": torch.ones(shape[0]) for name, shape in shapes.items()}
    projector |= dict.fromkeys(("pre_norm.weight", "pre_norm.bias"), torch.ones(vision["hidden_size"]))
    tensors = {f"vision_tower.{name}": tensor for name, tensor in case.inputs.items()}
    tensors |= {f"multi_modal_projector.{name}": tensor.clone() for name, tensor in projector.items()}
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def items_of(pixels: torch.Tensor, grids: list[list[int]]) -> list[MediaItem]:
    parts = pixels.flatten(1).split([rows * columns for rows, columns in grids])
    return [
        MediaItem(kind="image", patches=rows_NP, grid=(1, rows, columns))
        for rows_NP, (rows, columns) in zip(parts, grids, strict=True)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tower_equals_the_recorded_outputs_in_every_layout(recorded: Checkpoint, layout: str) -> None:
    config = RECIPE.read_config(recorded)
    tower: Any = RECIPE.tower(recorded, "float32")
    for case in counted("moonvit", "run", number=6):
        items = items_of(case.inputs["pixels"], case.meta["grids"])
        with torch.inference_mode():
            rows, call = tower.begin(RECIPE.prepare(config, items, layout))
            for block in tower.blocks:
                rows = block(rows, call)
            found = call.restore(tower.norm(rows)).unflatten(0, (-1, 4))
        torch.testing.assert_close(found, case.outputs["out"], rtol=0, atol=NEAR)


def test_the_reference_equals_the_recorded_outputs_tables_and_turns(recorded: Checkpoint) -> None:
    reference: Any = RECIPE.reference(recorded)
    norm, table = reference.tower["encoder"]["final_layernorm"], reference.tower["patch_embed"]["pos_emb"]
    for case in counted("moonvit", "run", number=6):
        items = items_of(case.inputs["pixels"], case.meta["grids"])
        with torch.inference_mode():
            found = torch.cat([reference.in_cells(norm(reference.rows(item)[-1]), item) for item in items])
        torch.testing.assert_close(found.unflatten(0, (-1, 4)), case.outputs["out"], rtol=0, atol=NEAR)
        turns = torch.cat(
            [kimi_vl.turns(*item.grid[1:], reference.module.get_buffer("speed_K")) for item in items]
        )
        torch.testing.assert_close(torch.view_as_real(turns), case.outputs["rope"], rtol=0, atol=NEAR)
        places = torch.cat([kimi_vl.resized_table(table["weight"], *item.grid[1:]) for item in items])
        torch.testing.assert_close(places, case.outputs["pos"], rtol=0, atol=NEAR)


def test_cells_take_the_patches_that_were_recorded(recorded: Checkpoint) -> None:
    packing = RECIPE.packing(RECIPE.read_config(recorded))
    for case in counted("moonvit", "gather", number=10):
        grids = torch.tensor([[1, *sides] for sides in case.meta["grids"]], dtype=torch.int64).reshape(-1, 3)
        found = packing.row_tables({"grids": grids}, torch.empty(0))["raster"]
        assert torch.equal(found, case.outputs["idx"])
