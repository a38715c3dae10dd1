"""The generic recipe: classes of transformers, held to the same classes as transformers itself loads them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import Any

import onnx
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from safetensors.torch import load_file
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name
from vlexport.recipes import generic

from benchmarks.classes import PIXELS, random_state, tiny, tried, write_checkpoint
from tests.cli.lines import bundle_of, vlexport
from tests.recipes.whole_checkpoints import GRID, SIDE, TOKENIZER, VIT
from vlexport._build.build import build_checkpoint
from vlexport._build.export import export
from vlexport._build.request import request
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.codec import canonical, decode, encode, parse
from vlexport.errors import CheckpointError, InputError
from vlexport.parity.report import ParityReport
from vlexport.parity.samples import random_items
from vlexport.recipe import recipe_for, tried_classes
from vlexport.specs import Pixels
from vlexport.vision.attention.layout import LAYOUTS
from vlexport.vision.features.calls import UncutRows
from vlexport.vision.features.classes import vision_model
from vlexport.vision.features.pixels import (
    Processor,
    image_rule,
    longest_edge_rule,
    patch_count_rule,
    per_frame,
    to_item,
)
from vlexport.vision.features.stock import StockFeatures
from vlexport.vision.features.tower import USUAL_SIDE, first
from vlexport.vision.preprocess import patch_rule

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="classes of transformers that take their tables, as those of 5.23 do",
)
# Each takes or gives rows in a way of its own, or was promised.
CLASSES = (
    "qwen2_5_omni_thinker", "qwen3_5", "glm4v", "glm_ocr", "internvl", "llava_onevision", "siglip2", "gemma3",
    "lighton_ocr", "idefics3", "smolvlm", "mistral3", "qwen3_vl", "paligemma", "qwen2_5_vl", "paddleocr_vl",
)  # fmt: skip
# Those that take one picture, as their own processor makes it: floats beside masks, sizes, or grids.
PICTURES = ("lfm2_vl", "hunyuan_vl", "minicpmv4_6")
# Those with a recipe of their own, which take the generic one by name.
WRITTEN = ("qwen2_5_vl", "qwen3_vl")
# A row of ours is at most 4e-6 from the class's own; outputs of wrong segments are 0.1 away.
NEAR = 1e-5
TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 12, "vocab_size": 96,
}  # fmt: skip
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
    whole: Any = getattr(transformers, f"{kind}ForConditionalGeneration")
    text = {"model_type": "llama", **TEXT} if kind == "Llava" else TEXT
    model = whole(whole.config_class(**settings, text_config=text))
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
    loaded = whole.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        given = recipe.tower(checkpoint, "float32")(recipe.prepare(config, items, "grouped"))
    wanted = StockFeatures(loaded.model, packing, form=config.form).run(items)
    assert list(given) == list(wanted)
    assert all(error(given[each], rows) < NEAR for each, rows in wanted.items())


def test_infinity_in_settings_is_read_as_transformers_writes_it():
    settings, model = tiny("nemotron_h_omni")
    assert settings["text_config"]["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert model.config.text_config.time_step_limit == [0.0, float("inf")]


@pytest.mark.seconds
@pytest.mark.parametrize("model_type", ["lfm2_vl", *slow(PICTURES[1:])])
def test_a_picture_of_one_shape_gives_the_rows_of_the_class_and_others_are_refused(model_type, tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(model_type, tmp_path / "tiny"))
    recipe = recipe_for(checkpoint, "generic")
    # As a manifest gives it back.
    config = decode(generic.Config, parse(canonical(encode(recipe.read_config(checkpoint)))))
    assert config.form == "picture"
    side = first(vision_model(model_type, checkpoint.config, "eager", meta=True), "image_size") or USUAL_SIDE
    item = recipe.preprocess(config, picture(side, side))
    wanted = recipe.reference(checkpoint).run([item])
    with torch.inference_mode():
        given = recipe.tower(checkpoint, "float32")(recipe.prepare(config, [item], "grouped"))
    for name, rows in wanted.items():
        assert error(given[name], rows) < NEAR
    with pytest.raises(InputError, match=r"the processor makes .* of it, but the bundle takes"):
        recipe.preprocess(config, picture(side, 2 * side))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*CLASSES, *PICTURES])
def test_a_bundle_passes_and_encodes_a_mix_that_was_not_traced(model_type, tmp_path):
    found = tried(model_type, tmp_path)
    assert found["exports"], found


@pytest.mark.slow
def test_a_traced_class_runs_the_kernels_of_the_recipe_that_is_written_for_it(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint("qwen2_5_vl", tmp_path / "tiny"))
    backend, counts = find_backend("onnxruntime"), []
    for name in ("qwen2_5_vl", "generic"):
        (tmp_path / name).mkdir()
        graph = export(recipe_for(checkpoint, name), checkpoint, form=backend.form)
        backend.build(graph, backend.options(), tmp_path / name)
        nodes = onnx.load(tmp_path / name / "model.onnx", load_external_data=False).graph.node
        counts.append(Counter(node.op_type for node in nodes))
    for kernel in ("Gemm", "MatMul", "Conv", "RotaryEmbedding", "SegmentAttention", "Mul", "Add", "Neg"):
        assert counts[0][kernel] == counts[1][kernel], kernel
    assert counts[0]["RotaryEmbedding"] > 0


ROUNDED = (
    ("eager", "bfloat16"), ("inductor", "bfloat16"), ("openvino", "bfloat16"), ("onnxruntime", "int8"),
    ("openvino", "int8"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm4v", "gemma3", "internvl", "siglip2"])
@pytest.mark.parametrize(("backend", "kind"), ROUNDED)
def test_rounded_bundles_pass_and_lose_what_the_class_loses(model_type, backend, kind, tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(model_type, tmp_path / model_type))
    precision: dict[str, Any] = {"quantize": kind} if kind == "int8" else {"dtype": kind}
    able = next(each for each in find_backend(backend).capabilities if each.spelled == kind)
    if reason := find_backend(backend).cannot_compute(able.precision):
        pytest.skip(reason)
    spec = request(checkpoint, backend=backend, recipe="generic", output_dir=tmp_path, **precision)
    bundle = build_checkpoint(spec, lambda *_: None).require_passed()
    rows = ParityReport.from_json(bundle.verdict.table).rows
    ratios = [row.metrics["ratio"] for row in rows if "ratio" in row.metrics]
    assert ratios
    if backend == "onnxruntime":
        # The same integers lose the same: 4e-6 apart measured. A value at half a step goes either way, by the
        # processor too: half of the calls are 0.002 apart, with VNNI all within 0.02, with AVX2 within 0.061.
        apart = sorted(abs(ratio - 1) for ratio in ratios)
        assert apart[0] < 1e-4
        assert apart[len(apart) // 2] < 0.01
        assert apart[-1] < 0.07


def picture(height: int, width: int) -> Pixels:
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    bands = (127 + 120 * torch.sin(x / 9 + y / 14), 255 * x / width, 255 * y / height)
    return Pixels(kind="image", frames=torch.stack(bands, -1)[None].to(torch.uint8))


# What a processor's file holds, for towers of 32 pixels a side in patches of 8 (20 in patches of 5, 28 of 7).
# Without resample, mean and the rest, which are the class's own: Lanczos, bilinear, bicubic.
PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]], "crop_size": SIDE}
PAN = {
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "idefics3": ("Idefics3", {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}),
    "idefics3 whole": (
        "Idefics3",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": False},
    ),
    "smolvlm": ("SmolVLM", {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}),
    "llava_next": ("LlavaNext", {**PINPOINTS, "size": {"shortest_edge": 32}}),
    "llava_onevision": ("LlavaOnevision", {**PINPOINTS, "size": SIDE}),
    "got_ocr2": ("GotOcr2", {"size": SIDE}),
    "got_ocr2 in tiles": ("GotOcr2", {"size": SIDE, "crop_to_patches": True, "max_patches": 6}),
    "gemma3": ("Gemma3", {"size": SIDE}),
    "gemma3 in tiles": ("Gemma3", {"size": SIDE, "do_pan_and_scan": True, **PAN}),
    "ovis2 in tiles": ("Ovis2", {"size": SIDE, "crop_to_patches": True}),
    "clip": ("CLIP", {"size": {"shortest_edge": 40}, "crop_size": SIDE}),
    "clip without crop": ("CLIP", {"size": SIDE, "do_center_crop": False}),
    "siglip": ("Siglip", {"size": SIDE}),
    "siglip by halves": ("Siglip", {"size": SIDE, "rescale_factor": 1 / 128, "resample": 0}),
    "siglip as bytes": ("Siglip", {"size": SIDE, "do_rescale": False, "do_normalize": False}),
    "janus": ("Janus", {"size": SIDE, "background_color": [10, 20, 30]}),
    "llava padded": ("Llava", {"size": {"shortest_edge": 32}, "crop_size": SIDE, "do_pad": True}),
}  # fmt: skip


def theirs(name: str, settings: dict[str, Any], pixels: Pixels) -> dict[str, torch.Tensor]:
    """Return what an image processor of transformers makes of a picture, without torchvision."""
    kind = get_image_processor_class_from_name(f"{name}ImageProcessorPil")
    found: dict[str, torch.Tensor] = kind(**settings)(
        Image.fromarray(pixels.frames[0].numpy()), return_tensors="pt"
    )
    return found


def stored(name: str, settings: dict[str, Any]) -> Processor:
    return Processor.of("clip", {"image_processor_type": f"{name}ImageProcessorFast", **settings})


def read_back(processor: Processor) -> Processor:
    """Return a processor as a manifest gives it back."""
    return decode(Processor, parse(canonical(encode(processor))))


def test_a_picture_becomes_the_images_of_the_models_processor_tiles_included(subtests):
    several = []
    for case, (name, settings) in PROCESSORS.items():
        for size in [(90, 140), (61, 33), (33, 240), (32, 32)]:
            with subtests.test(case, size=size):
                processor = read_back(stored(name, settings))
                rule = image_rule(processor, 32, 8)
                given = to_item(rule, "images", (processor, None), picture(*size))
                wanted = theirs(name, settings, picture(*size))["pixel_values"].float().flatten(0, -4)
                assert given.grid == (1, 4 * len(wanted), 4)
                cut = torch.nn.functional.unfold(wanted, 8, stride=8).transpose(1, 2).flatten(0, 1)
                assert torch.equal(given.patches, cut)
                several += [case] * (len(wanted) > 1)
    tiled = {"idefics3", "smolvlm", "llava_next", "llava_onevision", "got_ocr2 in tiles", "gemma3 in tiles"}
    assert set(several) == {*tiled, "ovis2 in tiles"}


def test_every_setting_of_a_file_is_followed_and_one_that_is_missing_is_the_classes_own(subtests):
    """The class is made by transformers from the file alone; a change of a setting changes the pixels."""
    whole = {
        "do_resize": True, "size": {"shortest_edge": 40}, "resample": 2, "do_center_crop": True,
        "crop_size": SIDE, "do_rescale": True, "rescale_factor": 1 / 200, "do_normalize": True,
        "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_convert_rgb": True,
    }  # fmt: skip
    changed = {
        "size": {"shortest_edge": 60}, "resample": 1, "rescale_factor": 1 / 100, "do_normalize": False,
        "image_mean": [0.3, 0.2, 0.1], "image_std": [0.6, 0.5, 0.4], "do_rescale": False, "do_resize": False,
    }  # fmt: skip
    files = {f"without {key}": {name: each for name, each in whole.items() if name != key} for key in whole}
    files |= {f"other {key}": {**whole, key: each} for key, each in changed.items()}
    shown = picture(70, 50)
    before = theirs("CLIP", whole, shown)["pixel_values"]
    for what, settings in files.items():
        with subtests.test(what):
            wanted = theirs("CLIP", settings, shown)["pixel_values"]
            made = stored("CLIP", settings).images(shown)[0]["pixel_values"]
            assert torch.equal(made, wanted)
            assert "other" not in what or not torch.equal(wanted, before)


def test_a_switch_that_the_processor_of_text_and_images_turns_on_is_on():
    """`InternVLProcessor` cuts pictures, whose own file has it off; GotOcr2Processor does not by itself."""
    file = {"image_processor_type": "GotOcr2ImageProcessor", "size": SIDE}
    for model_type, extra, count in (
        ("internvl", {}, 7), ("internvl", {"crop_to_patches": False}, 7), ("got_ocr2", {}, 1),
        ("got_ocr2", {"crop_to_patches": True}, 7),
    ):  # fmt: skip
        (made,) = Processor.of(model_type, {**file, **extra}).images(picture(90, 140))
        assert len(made["pixel_values"]) == count, (model_type, extra)


def test_grids_and_rows_of_patches_are_those_of_the_processor():
    pixels = picture(61, 133)
    settings = {**PIXELS, "size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}}
    rule = longest_edge_rule(settings, patch=8, merge=2)
    given = to_item(rule, "strip", (stored("Pixtral", settings).cut_into({"patch_size": 16}), None), pixels)
    wanted = theirs("Pixtral", {**settings, "patch_size": 16}, pixels)["pixel_values"]
    assert given.grid == (1, wanted.shape[2] // 8, wanted.shape[3] // 8)
    cells = torch.nn.functional.unfold(wanted, 16, stride=16)[0].T.unflatten(1, (3, 2, 8, 2, 8))
    assert torch.equal(given.patches, cells.permute(0, 2, 4, 1, 3, 5).reshape(given.patches.shape))
    settings = {**PIXELS, "resample": 2, "patch_size": 8, "max_num_patches": 60}
    rule = patch_count_rule(settings, patch=8)
    given = to_item(rule, "patches", (stored("Siglip2", settings), None), pixels)
    found = theirs("Siglip2", settings, pixels)
    rows = given.patches.unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
    assert given.grid[1:] == tuple(found["spatial_shapes"][0].tolist())
    assert found["pixel_attention_mask"].sum() == len(rows)
    assert torch.equal(rows, found["pixel_values"][0, : len(rows)])
    bounds = {"shortest_edge": 2 * 3136, "longest_edge": 2 * 12544}
    settings = {**PIXELS, "size": bounds, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    volume = patch_rule(per_frame(settings), {**PIXELS}, patch=14, merge=2, temporal=2)
    glm = stored("Glm4v", settings)
    given = to_item(volume, "grids", (glm, None), pixels)
    found = theirs("Glm4v", settings, pixels)
    assert given.grid == tuple(found["image_grid_thw"][0].tolist())
    assert torch.equal(given.patches, found["pixel_values"])
    # A processor that makes patches line by line: items have them cell by cell, and so has the class.
    settings = {**settings, "size": {"shortest_edge": 3136, "longest_edge": 12544}, "temporal_patch_size": 1}
    lines, rule = stored("PaddleOCRVL", settings), patch_rule(settings, PIXELS, patch=14, merge=2, temporal=1)
    given, found = to_item(rule, "raster", (lines, None), pixels), theirs("PaddleOCRVL", settings, pixels)
    columns = given.grid[2]
    assert given.grid == tuple(found["image_grid_thw"][0].tolist())
    second_line = found["pixel_values"][columns : columns + 2].flatten(1)
    assert torch.equal(given.patches[2:4], second_line)
    clip = Pixels(kind="video", frames=pixels.frames.repeat(4, 1, 1, 1), frames_per_second=2.0)
    with pytest.raises(InputError, match="how 'Glm4vImageProcessor' resizes videos is not known"):
        to_item(volume, "grids", (glm, None), clip)


def test_frames_of_a_video_are_made_by_its_own_processor_or_as_single_images():
    clip = Pixels(kind="video", frames=picture(40, 60).frames.repeat(3, 1, 1, 1), frames_per_second=2.0)
    whole, tiled = (stored(*PROCESSORS[each]) for each in ("siglip", "llava_onevision"))
    rule = image_rule(whole, 32, 8)
    assert to_item(rule, "images", (whole, None), clip).grid == (3, 4, 4)
    with pytest.raises(InputError, match=r"cuts each frame into tiles .*Pass frames as images"):
        to_item(rule, "images", (tiled, None), clip)
    settings = {"size": SIDE, "resample": 3, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.25]}
    own = Processor.of_frames({"video_processor_type": "LlavaOnevisionVideoProcessor", **settings})
    given = to_item(rule, "images", (tiled, own), clip)
    wanted = theirs("Siglip", settings, picture(40, 60))["pixel_values"]
    assert given.grid == (3, 4, 4)
    cut = torch.nn.functional.unfold(wanted, 8, stride=8)[0].T
    assert torch.allclose(given.patches, cut.repeat(3, 1), atol=1e-6)
    part = Processor.of_frames({"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SIDE})
    with pytest.raises(InputError, match="is not known here"):
        to_item(rule, "images", (tiled, part), clip)


def test_what_a_processor_does_that_no_tower_takes_is_refused_with_the_way_round_it():
    unknown = Processor.of("perceiver", {"image_processor_type": "NoneSuchImageProcessor", "size": SIDE})
    rule = image_rule(unknown, 32, 8)
    with pytest.raises(InputError, match=r"how 'NoneSuchImageProcessor' resizes is not known.*encode_items"):
        to_item(rule, "images", (unknown, None), picture(40, 40))
    with pytest.raises(
        CheckpointError, match=r"images of 40x40 pixels of it, but the tower takes whole ones"
    ):
        image_rule(stored("Siglip", {"size": {"height": 40, "width": 40}}), 32, 8)
    with pytest.raises(CheckpointError, match="longest_edge: 100000 given, at most 8192 expected"):
        image_rule(stored("Idefics3", {"size": {"longest_edge": 100000}}), 32, 8)
    with pytest.raises(CheckpointError, match="CLIPImageProcessor does not take them"):
        stored("CLIP", {"size": {"height": "tall"}, "crop_size": "x"})
    # Pictures keep their shape, which the tower pads and masks.
    kept = stored("Idefics2", {"size": {"shortest_edge": 20, "longest_edge": 32}})
    with pytest.raises(InputError, match=r"'Idefics2ImageProcessor' makes images of 32x20 pixels of it"):
        to_item(image_rule(kept, 32, 8), "nested", (kept, None), picture(40, 64))


# The first has the picture that its tower takes, the others have tiles of one.
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["paligemma", "smolvlm", "llava_next"])
def test_a_picture_goes_from_the_shell_to_the_rows_of_transformers(model_type, tmp_path):
    folder = write_checkpoint(model_type, tmp_path / "tiny")
    side = first(
        vision_model(model_type, json.loads((folder / "config.json").read_text()), "eager", meta=True),
        "image_size",
    )
    shown, alone = picture(side, side), dict[str, Any]()
    if model_type == "paligemma":
        mean, std = (torch.tensor(PIXELS[name])[:, None, None] for name in ("image_mean", "image_std"))
        images = ((shown.frames[0].permute(2, 0, 1) / 255 - mean) / std)[None]
    else:
        shown, (kind, settings) = picture(90, 140), PROCESSORS[model_type]
        settings = json.loads(json.dumps(settings).replace("32", str(side)).replace("64", str(2 * side)))
        file = {"image_processor_type": f"{kind}ImageProcessor", **settings}
        (folder / "preprocessor_config.json").write_text(json.dumps(file))
        images = theirs(kind, settings, shown)["pixel_values"].flatten(0, -4)
        assert images.shape[0] > 4
        # All tiles as one: classes join them by the size of the picture, which is the decoder's part.
        alone = {} if model_type == "smolvlm" else {"image_sizes": []}
        images = images if alone else images[None]
    Image.fromarray(shown.frames[0].numpy()).save(tmp_path / "picture.png")
    bundle = bundle_of(folder, "--backend", "eager", "--output-dir", tmp_path / "engines")
    out = tmp_path / "rows.safetensors"
    vlexport("encode", bundle, "--image", tmp_path / "picture.png", "--output", out).ends(0)
    (rows,) = (each for key, each in load_file(out).items() if key.endswith(".embeds"))
    checkpoint = Checkpoint.open(folder)
    model: Any = recipe_for(checkpoint).reference(checkpoint).module
    with torch.inference_mode(), UncutRows():
        parts = model.get_image_features(images, **alone).pooler_output
    assert error(rows, torch.cat([each.flatten(0, -2) for each in parts])) < NEAR
    shutil.copy(TOKENIZER / "tokenizer.json", folder)
    question = ("--image", tmp_path / "picture.png", "--prompt", "What?")
    refused = vlexport("run", bundle, "--checkpoint", folder, *question).ends(2)
    lacks = "'video_processor'" if model_type == "smolvlm" else "Pass a checkpoint with its language model"
    assert lacks in refused.err


@pytest.mark.seconds
def test_the_list_of_classes_shows_which_export_and_why_others_fail():
    listed = vlexport("list", "--all", "--json").document["transformers"]
    assert listed == json.loads(json.dumps(tried_classes()))
    exports = {each["model_type"]: each["outputs"] for each in listed["classes"] if each["exports"]}
    assert {*CLASSES, *PICTURES} <= set(exports)
    assert exports["qwen3_vl"] == ["embeds", "level_0", "level_1"]
    assert len(exports) >= 85
    fails = [each for each in listed["classes"] if not each["exports"]]
    assert all(each["step"] and 0 < len(each["reason"]) < 160 for each in fails)
    shown = vlexport("list", "--all").out
    assert "Qwen2_5OmniThinkerModel" in shown
    (row,) = (line.split() for line in shown.splitlines() if "Qwen3VLMoeModel" in line)
    assert row[:3] == ["qwen3_vl_moe", "Qwen3VLMoeModel", "qwen3_vl"]
    assert "InternVLModel" not in vlexport("list").out
