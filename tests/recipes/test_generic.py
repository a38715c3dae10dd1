"""The generic recipe: classes of transformers, held to the same classes as transformers itself loads them."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from safetensors.torch import load_file
from vlexport.recipes import generic

from benchmarks.classes import PIXELS, random_state, tiny, tried, write_checkpoint
from tests.cli.lines import vlexport
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError
from vlexport.parity.samples import random_items
from vlexport.recipe import recipe_for, tried_classes
from vlexport.specs import Pixels
from vlexport.vision.attention.layout import LAYOUTS
from vlexport.vision.features.pixels import (
    LONGEST_EDGE,
    VOLUME,
    image_rule,
    longest_edge_rule,
    patch_count_rule,
    per_frame,
    to_item,
)
from vlexport.vision.features.stock import StockFeatures
from vlexport.vision.preprocess import patch_rule

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="classes of transformers that take their tables, as those of 5.23 do",
)
# Each takes or gives rows in a way of its own, or was promised.
CLASSES = (
    "qwen2_5_omni_thinker", "qwen3_5", "glm4v", "glm_ocr", "internvl", "llava_onevision", "siglip2", "gemma3",
    "lighton_ocr", "idefics3", "smolvlm", "mistral3", "qwen3_vl", "paligemma", "qwen2_5_vl",
)  # fmt: skip
# Those with a recipe of their own, which take the generic one by name.
WRITTEN = ("qwen2_5_vl", "qwen3_vl")
# A row of ours is at most 4e-6 from the class's own; outputs of wrong segments are 0.1 away.
NEAR = 1e-5
TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 12, "vocab_size": 96,
}  # fmt: skip
VIT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
GRID = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 48}
# Models that transformers writes under the names of their repositories: class and settings.
STORED: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("Llava", {"vision_config": {"model_type": "clip_vision_model", **VIT}}),
    "llava of pixtral": (
        "Llava",
        {
            "vision_config": {"model_type": "pixtral", **VIT, "head_dim": 16},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava of two layers": (
        "Llava",
        {"vision_config": {"model_type": "clip_vision_model", **VIT}, "vision_feature_layer": [-2, -3]},
    ),
    "internvl": ("InternVL", {"vision_config": {**VIT, "image_size": [32, 32], "patch_size": [8, 8]}}),
    "gemma3": ("Gemma3", {"vision_config": VIT, "mm_tokens_per_image": 4}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"vision_config": {**GRID, "fullatt_block_indexes": [1]}}),
    "qwen3_vl": (
        "Qwen3VL",
        {"vision_config": {**GRID, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}},
    ),
    "glm4v": ("Glm4v", {"vision_config": {**GRID, "image_size": 84}}),
}


def slow(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    assert given.shape == wanted.shape
    return float((given.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("model_type", ["llava", *slow(CLASSES)])
def test_a_class_with_our_attention_gives_the_rows_that_it_gives_with_its_own(model_type, tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(model_type, tmp_path / "tiny"))
    recipe = recipe_for(checkpoint, "generic")
    config = recipe.read_config(checkpoint)
    assert recipe_for(checkpoint).name == (model_type if model_type in WRITTEN else "generic")
    tower, reference = recipe.tower(checkpoint, "float32"), recipe.reference(checkpoint)
    for mix in recipe.shape_sets(config).values():
        items = random_items(recipe, config, mix, seed=3)
        wanted = reference.run(items)
        assert list(wanted) == list(config.outputs)
        for layout in LAYOUTS:
            with torch.inference_mode():
                given = tower(recipe.prepare(config, items, layout))
            for name, rows in wanted.items():
                assert error(given[name], rows) < NEAR, (layout, mix, name)


@pytest.mark.parametrize("name", ["llava", *slow(tuple(each for each in STORED if each != "llava"))])
def test_a_model_that_transformers_wrote_gives_what_transformers_reads(name, tmp_path):
    """Names, feature layers, strategies, projectors and levels are those of a model as it is stored."""
    kind, settings = STORED[name]
    made: Any = getattr(transformers, f"{kind}ForConditionalGeneration")
    text = {"model_type": "llama", **TEXT} if kind == "Llava" else TEXT
    model = made(made.config_class(**settings, text_config=text))
    model.load_state_dict({**model.state_dict(), **random_state(model)})
    model.save_pretrained(tmp_path)
    by_size = "model_type" not in settings["vision_config"] or "pixtral" not in name
    size = {"height": 32, "width": 32} if by_size else {"longest_edge": 64}
    settings_file = tmp_path / "preprocessor_config.json"
    settings_file.write_text(
        json.dumps({**PIXELS, **({} if "depth" in settings["vision_config"] else {"size": size})})
    )
    checkpoint = Checkpoint.open(tmp_path)
    recipe, config = generic.RECIPE, generic.RECIPE.read_config(checkpoint)
    packing = recipe.packing(config)
    mix = max(packing.mixes().values(), key=len)
    items = random_items(recipe, config, mix, seed=0)
    loaded = made.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        given = recipe.tower(checkpoint, "float32")(recipe.prepare(config, items, "grouped"))
    wanted = StockFeatures(loaded.model, packing, form=config.form).run(items)
    assert list(given) == list(wanted)
    assert all(error(given[each], rows) < NEAR for each, rows in wanted.items())


def test_infinity_in_settings_is_read_as_transformers_writes_it():
    settings, model = tiny("nemotron_h_omni")
    assert settings["text_config"]["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert model.config.text_config.time_step_limit == [0.0, float("inf")]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CLASSES)
def test_a_bundle_passes_and_encodes_a_mix_that_was_not_traced(model_type, tmp_path):
    found = tried(model_type, tmp_path)
    assert found["exports"], found


@pytest.mark.slow
def test_a_picture_goes_from_the_shell_to_the_rows_of_transformers(tmp_path):
    """The picture has the size of the tower, so that no resize comes between the two."""
    folder = write_checkpoint("paligemma", tmp_path / "tiny")
    checkpoint = Checkpoint.open(folder)
    config = recipe_for(checkpoint).read_config(checkpoint)
    side = config.rule.side
    levels = torch.randint(0, 256, (side, side, 3), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    Image.fromarray(levels.numpy()).save(tmp_path / "picture.png")
    built = vlexport("build", folder, "--backend", "eager", "--output-dir", tmp_path / "engines")
    assert built.code == 0, built.err
    bundle, out = built.lines[-1], tmp_path / "rows.safetensors"
    done = vlexport("encode", bundle, "--image", tmp_path / "picture.png", "--output", out)
    assert done.code == 0, done.err
    mean, std = (torch.tensor(PIXELS[name])[:, None, None] for name in ("image_mean", "image_std"))
    pixels = ((levels.permute(2, 0, 1) / 255 - mean) / std)[None]
    model: Any = recipe_for(checkpoint).reference(checkpoint).module
    with torch.inference_mode():
        wanted = model.get_image_features(pixels).pooler_output.flatten(0, 1)
    (rows,) = (each for name, each in load_file(out).items() if each.shape == wanted.shape)
    assert error(rows, wanted) < NEAR
    refused = vlexport(
        "run", bundle, "--decoder", folder, "--image", tmp_path / "picture.png", "--prompt", "What?"
    )
    assert refused.code == 2
    assert "declares no language model. Use `encode` and your own decoder." in refused.err


def picture(height: int, width: int) -> Pixels:
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    bands = (127 + 120 * torch.sin(x / 9 + y / 14), 255 * x / width, 255 * y / height)
    return Pixels(kind="image", frames=torch.stack(bands, -1)[None].to(torch.uint8))


def processed(name: str, module: str, settings: dict[str, Any], pixels: Pixels) -> dict[str, torch.Tensor]:
    """Return what an image processor of transformers makes of a picture, without torchvision."""
    kind = getattr(
        importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), name
    )
    found: dict[str, torch.Tensor] = kind(**settings)(
        Image.fromarray(pixels.frames[0].numpy()), return_tensors="pt"
    )
    return found


@pytest.mark.parametrize("size", [(90, 140), (61, 33), (33, 240)])
def test_pictures_are_cut_as_the_processors_of_transformers_cut_them(size):
    """Two grey levels of 255, over a deviation of 0.2, are 0.04; libraries round the resize of bytes."""
    pixels, near = picture(*size), 0.04
    crop = {
        **PIXELS,
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "do_center_crop": True,
    }
    whole = {**PIXELS, "size": {"height": 32, "width": 32}}
    for name, module, settings in (
        ("CLIPImageProcessorPil", "clip", crop),
        ("SiglipImageProcessorPil", "siglip", whole),
    ):
        rule = image_rule(settings, 32, 8)
        given = to_item(rule, name, generic.way_of(name), pixels)
        wanted = processed(name, module, settings, pixels)["pixel_values"]
        cut = torch.nn.functional.unfold(wanted, 8, stride=8)[0].T
        assert float((given.patches - cut).abs().max()) < near, name
    settings = {**PIXELS, "size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}}
    given = to_item(longest_edge_rule(settings, patch=8, merge=1), "", LONGEST_EDGE, pixels)
    wanted = processed("PixtralImageProcessorPil", "pixtral", settings, pixels)["pixel_values"]
    assert given.grid == (1, wanted.shape[2] // 8, wanted.shape[3] // 8)
    cut = torch.nn.functional.unfold(wanted, 8, stride=8)[0].T
    assert float((given.patches - cut).abs().max()) < near
    settings = {**PIXELS, "resample": 2, "patch_size": 8, "max_num_patches": 60}
    given = to_item(patch_count_rule(settings, patch=8), "", generic.way_of("Siglip2ImageProcessor"), pixels)
    found = processed("Siglip2ImageProcessorPil", "siglip2", settings, pixels)
    rows = given.patches.unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
    assert given.grid[1:] == tuple(found["spatial_shapes"][0].tolist())
    assert found["pixel_attention_mask"].sum() == len(rows)
    assert float((rows - found["pixel_values"][0, : len(rows)]).abs().max()) < near
    bounds = {"shortest_edge": 2 * 3136, "longest_edge": 2 * 12544}
    settings = {**PIXELS, "size": bounds, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    volume = patch_rule(per_frame(settings), {**PIXELS}, patch=14, merge=2, temporal=2)
    given = to_item(volume, "", VOLUME, pixels)
    found = processed("Glm4vImageProcessorPil", "glm4v", settings, pixels)
    assert given.grid == tuple(found["image_grid_thw"][0].tolist())
    assert float((given.patches - found["pixel_values"]).abs().max()) < near


def test_a_processor_whose_resize_is_not_known_is_refused_with_the_way_round_it():
    rule = image_rule({**PIXELS, "size": {"height": 32, "width": 32}}, 32, 8)
    with pytest.raises(InputError, match=r"how 'PerceiverImageProcessor' resizes is not known.*encode_items"):
        to_item(rule, "PerceiverImageProcessor", generic.way_of("PerceiverImageProcessor"), picture(40, 40))


def test_the_list_of_classes_shows_which_export_and_why_others_fail():
    listed = vlexport("list", "--all", "--json").document["transformers"]
    assert listed == json.loads(json.dumps(tried_classes()))
    exports = {each["model_type"]: each["outputs"] for each in listed["classes"] if each["exports"]}
    assert set(CLASSES) <= set(exports)
    assert exports["qwen3_vl"] == ["embeds", "level_0", "level_1"]
    assert len(exports) >= 14
    fails = [each for each in listed["classes"] if not each["exports"]]
    assert all(each["step"] and 0 < len(each["reason"]) < 160 for each in fails)
    shown = vlexport("list", "--all").out
    assert "Qwen2_5OmniThinkerModel" in shown
    (row,) = (line.split() for line in shown.splitlines() if "Qwen3VLMoeModel" in line)
    assert row[:3] == ["qwen3_vl_moe", "Qwen3VLMoeModel", "qwen3_vl"]
    assert "InternVLModel" not in vlexport("list").out
