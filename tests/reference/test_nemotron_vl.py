"""Nemotron-Nano-VL's pixels, tiles, prompts and pruning against processors and the class of transformers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from vlexport.recipes import nemotron_vl
from vlexport.recipes.demo.nemotron_vl import Tiny, config_json, contents, processor_json
from vlexport.recipes.demo.writing import write_checkpoint

from tests.mutation.trials import TRIALS
from tests.reference.processors import processor_module
from tests.slice_mixes import relative_l2
from vlexport._build.token_graphs import eager_graphs
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.errors import InputError, LimitError
from vlexport.parity.samples import random_items
from vlexport.recipe import PromptItem, find_recipe
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.prompt import Prompter
from vlexport.runtime.prune import Pruner
from vlexport.runtime.request import Request, RequestLimits
from vlexport.runtime.tokenizer import CheckpointTokenizer
from vlexport.specs import NAMED_BOUNDS, MediaItem, Pixels

THEIRS, MISSING = "transformers.models.nemotron_h_omni", "transformers has no nemotron_h_omni"
CLASSES: Any = pytest.importorskip(f"{THEIRS}.modeling_nemotron_h_omni", reason=MISSING)
PROCESSING: Any = pytest.importorskip(f"{THEIRS}.processing_nemotron_h_omni", reason=MISSING)
RECIPE = find_recipe("nemotron_vl")
LIMIT = RECIPE.limits["float32"].relative_l2
FAMILY = "nemotron_h_omni"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = contents(Tiny(depth=1))
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("nemotron") / "tiny", made, seed=0))


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = contents(replace(TRIALS["nemotron_vl"]["tiles"], with_decoder=False))
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("nemotron") / "tiled", made, seed=0))


def noise(*size: int) -> Tensor:
    return torch.randint(256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# Near, above and below the bounds of 16 and 128 patches.
SIDES = [(16, 16), (64, 96), (90, 140), (33, 250), (500, 410), (1000, 90)]


def test_images_are_those_of_the_published_processor(tiny: Checkpoint) -> None:
    config, module = RECIPE.read_config(tiny), processor_module("image", FAMILY)
    settings = processor_json(Tiny())
    processor = module.NemotronH_Omni_Reasoning_V3ImageProcessor(
        **{name: value for name, value in settings.items() if name != "image_processor_type"}
    )
    for height, width in SIDES:
        frame = noise(1, height, width)
        item = RECIPE.preprocess(config, Pixels(kind="image", frames=frame))
        wanted = processor._preprocess(
            [frame[0].permute(2, 0, 1)],
            resample=3, do_rescale=True, rescale_factor=1 / 255, do_normalize=True,
            image_mean=processor.image_mean, image_std=processor.image_std, patch_size=16,
            downsample_ratio=0.5, min_num_patches=16, max_num_patches=128, max_model_len=4096,
            disable_grouping=None, return_tensors=None,
        )  # fmt: skip
        assert item.grid == (1, *wanted["image_grid_hw"][0].tolist())
        # Normalised in float64 there.
        torch.testing.assert_close(item.patches[:, :768].double(), wanted["pixel_values"], rtol=0, atol=2e-6)
        assert torch.equal(item.patches[:, 768:], item.patches[:, :768])


def test_sides_of_images_are_the_published_ones_and_within_every_profile(tiny: Checkpoint) -> None:
    config, source = RECIPE.read_config(tiny), random.Random(0)
    theirs = processor_module("image", FAMILY).get_patch_grid_size
    sizes = {name: RECIPE.packing(config).sizes(bounds) for name, bounds in NAMED_BOUNDS.items()}
    for _ in range(3000):
        height, width = (int(2 ** source.uniform(0, 12)) for _ in range(2))
        try:
            found = nemotron_vl.image_sides(height, width, config.rule)
        except LimitError:
            continue
        assert found == theirs(height, width, 16, 2, 16, 128)
        if max(height, width) <= 200 * min(height, width):
            for name, each in sizes.items():
                assert found[0] * found[1] + config.learned <= each.segments["frame"].length.max, name


@pytest.mark.parametrize("square", [False, True])
def test_videos_are_those_of_the_published_processor(tiny: Checkpoint, square: bool) -> None:
    module = processor_module("video", FAMILY)
    settings = {**processor_json(Tiny()), "video_maintain_aspect_ratio": not square}
    processor = module.NemotronH_Omni_Reasoning_V3VideoProcessor(**settings)
    config = replace(RECIPE.read_config(tiny), square=square)
    most = RECIPE.packing(config).sizes(NAMED_BOUNDS["video"]).segments["frame"].length.max
    # The last one has exactly the wanted patches where an odd side grows to whole cells.
    for height, width in (*SIDES, (8, 27)):
        frames = noise(3, height, width)
        item = RECIPE.preprocess(config, Pixels(kind="video", frames=frames, frames_per_second=4.0))
        made = processor._preprocess([frames.permute(0, 3, 1, 2)])
        wanted = torch.cat([made["pixel_values_videos"], made["pixel_values_videos"][-1:]])
        split = (
            item.patches.unflatten(0, item.grid).unflatten(-1, (2, 3, 16, 16)).permute(0, 3, 4, 1, 5, 2, 6)
        )
        found = split.flatten(5, 6).flatten(3, 4).flatten(0, 1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
        assert RECIPE.num_tokens(config, item) == 2 * made["num_tokens"][0]
        assert item.grid[1] * item.grid[2] + config.learned <= most


def frames_of(item: MediaItem) -> Tensor:
    split = item.patches.unflatten(0, item.grid).unflatten(-1, (3, 16, 16)).permute(0, 3, 1, 4, 2, 5)
    found: Tensor = split.flatten(4, 5).flatten(2, 3)
    return found


# `GotOcr2ImageProcessor` has the rule by which the V2 release, which is remote code, cuts images into tiles.
def test_grids_of_tiles_are_those_that_transformers_chooses() -> None:
    theirs, source = processor_module("image", "got_ocr2").get_optimal_tiled_canvas, random.Random(0)
    any_sides = [(int(2 ** source.uniform(0, 12)), int(2 ** source.uniform(0, 12))) for _ in range(1500)]
    # Of whole ratios several grids are equally near.
    whole = [(times * down, times * across) for times in (9, 50, 91, 182, 700)
             for down in range(1, 5) for across in range(1, 5)]  # fmt: skip
    for height, width in any_sides + whole:
        for side, most in ((64, 6), (512, 12), (512, 1)):
            across, down = theirs((height, width), (side, side), 1, most)
            assert nemotron_vl.tile_grid(height, width, side, most) == (down, across)


def test_tiles_and_frames_are_those_of_the_processor_in_transformers(tiled: Checkpoint) -> None:
    config = RECIPE.read_config(tiled)
    processor = processor_module("image", "got_ocr2").GotOcr2ImageProcessor()
    size, mean, std = SimpleNamespace(height=64, width=64), config.rule.mean, config.rule.std
    counts, profiles = set(), NAMED_BOUNDS.items()
    most = {name: nemotron_vl.RadioPacking(config).tokens(bounds) for name, bounds in profiles}
    for height, width in (*SIDES, (64, 64), (128, 64), (250, 50)):
        frame = noise(1, height, width)
        item = RECIPE.preprocess(config, Pixels(kind="image", frames=frame))
        planes = frame.permute(0, 3, 1, 2).float()
        wanted = processor.crop_image_to_patches(planes, 1, 6, patch_size=size, resample=3)[0]
        wanted = processor.rescale_and_normalize(wanted, True, 1 / 255, True, mean, std)
        assert item.grid == (len(wanted), 4, 4)
        # Normalised in float64 there.
        torch.testing.assert_close(frames_of(item).double(), wanted, rtol=0, atol=2e-6)
        counts.add(len(wanted))
        alone = RECIPE.preprocess(replace(config, thumbnail=False), Pixels(kind="image", frames=frame))
        assert torch.equal(frames_of(alone), frames_of(item)[: max(1, len(wanted) - 1)])
        video = RECIPE.preprocess(config, Pixels(kind="video", frames=noise(2, height, width)))
        planes = processor.resize(noise(2, height, width).permute(0, 3, 1, 2).float(), size, 3)
        wanted = processor.rescale_and_normalize(planes, True, 1 / 255, True, mean, std)
        torch.testing.assert_close(frames_of(video).double(), wanted, rtol=0, atol=2e-6)
        for name, bounds in profiles:
            tokens, frames, largest = most[name]
            assert largest == 4
            assert bounds.max_images * RECIPE.num_tokens(config, item) + 4 * bounds.max_frames <= tokens.max
            assert bounds.max_images * item.grid[0] + bounds.max_frames <= frames
    assert counts == {1, 3, 6, 7}


def test_texts_of_tiles_and_of_single_frames_are_those_of_the_processor(tiled: Checkpoint) -> None:
    config, rule = RECIPE.read_config(tiled), RECIPE.language.prompt  # type: ignore[union-attr]
    image = RECIPE.preprocess(config, Pixels(kind="image", frames=noise(1, 90, 200)))
    given = PromptItem(item=image, number=0, num_rows=RECIPE.num_tokens(config, image))
    assert rule.expand(config, given) == f"<img>{'<image>' * 4 * image.grid[0]}</img>"
    frames = Pixels(kind="video", frames=noise(3, 90, 200), frames_per_second=3.0)
    video = RECIPE.preprocess(config, frames)
    given = PromptItem(item=video, number=0, num_rows=12, count_frames=partial(tuple, [4] * 3))
    assert rule.expand(config, given) == published(video, 4, 3.0, [0, 1, 2], temporal=1)


def published(item: MediaItem, tokens: int, fps: float | None, indices: list[int], temporal: int = 2) -> str:
    """The video's text by the processor of transformers."""
    words: Any = SimpleNamespace(
        image_start_token="<img>", image_token="<image>", image_end_token="</img>",
        video_temporal_patch_dim=temporal,
    )  # fmt: skip
    metadata = SimpleNamespace(fps=fps, frames_indices=indices)
    found: str = PROCESSING.NemotronH_Omni_Reasoning_V3Processor.replace_video_token(
        words, {"num_tokens": [tokens]}, 0, num_frames=len(indices), video_metadata=metadata
    )
    return found


def test_texts_of_whole_items_are_those_of_the_published_processor(tiny: Checkpoint) -> None:
    config, rule = RECIPE.read_config(tiny), RECIPE.language.prompt  # type: ignore[union-attr]
    for frames, rate in ((1, 2.0), (4, 3.0), (5, 60.0)):
        item = RECIPE.preprocess(
            config, Pixels(kind="video", frames=noise(frames, 64, 96), frames_per_second=rate)
        )
        each = item.grid[1] * item.grid[2] // 4
        given = PromptItem(
            item=item, number=0, num_rows=0, count_frames=partial(tuple, [each] * item.grid[0])
        )
        assert rule.expand(config, given) == published(item, each, rate, list(range(frames)))
    image = PromptItem(
        item=random_items(RECIPE, config, [("image", (1, 4, 6))], seed=0)[0], number=0, num_rows=6
    )
    assert rule.expand(config, image) == f"<img>{'<image>' * 6}</img>"
    untimed = PromptItem(item=RECIPE.preprocess(config, Pixels(kind="video", frames=noise(2, 64, 96))),
                         number=0, num_rows=24)  # fmt: skip
    with pytest.raises(InputError, match=r"times of 0 frames given, those of 1 groups of 2 .*as fps"):
        rule.expand(config, untimed)


def test_pruning_keeps_what_the_class_keeps_and_the_prompt_shows_it_frame_by_frame(tiny, monkeypatch):
    config, reference = RECIPE.read_config(tiny), RECIPE.reference(tiny)
    rule: Any = RECIPE.language.prompt if RECIPE.language else None
    tokenizer = CheckpointTokenizer(tiny)
    prompter = Prompter(tokenizer, rule, lambda item: rule.expand(config, item))
    # This tokenizer merges nothing, so which texts it is given is seen here alone.
    texts, encode = list[str](), tokenizer.encode

    def recorded(text: str, **known: Any) -> Any:
        texts.append(text)
        return encode(text, **known)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    pruner = Pruner(RECIPE, RECIPE.merge(config), eager_graphs())
    frames = noise(7, 96, 64)
    frames[2:4] = frames[:2]
    pixels = Pixels(kind="video", frames=frames, seconds=tuple(0.5 + 0.25 * at for at in range(7)))
    item = RECIPE.preprocess(config, pixels)
    embeds = reference.run([item])["embeds"]
    tubelets, rows, columns = item.grid[0], item.grid[1] // 2, item.grid[2] // 2
    sides: Any = (tubelets, rows, columns)
    for rate in (0.3, 0.6, 0.9):
        whole = Encoded(kind="video", embeds=embeds, grid=item.grid, seconds_per_grid=0.5, layers={})
        found = pruner.prune(whole, rate, pruner.selector(None))
        wanted = CLASSES.compute_retention_mask(video_embeds=embeds, thw=sides, spatial_merge_size=1, q=rate)
        assert found.mask is not None
        assert torch.equal(found.mask, wanted)
        counts = wanted.view(tubelets, -1).sum(1).tolist()
        assert len(set(counts)) > 1
        num_kept = pruner.num_kept(item, len(embeds), rate)
        assert num_kept == sum(counts)
        given = PromptItem(
            item=item,
            number=0,
            num_rows=num_kept,
            count_frames=partial(pruner.frame_rows, item, num_kept, found.kept),
        )
        marked = prompter.mark(Request(prompt="What?", videos=[pixels]), RequestLimits())
        ids = prompter.expand(marked, [given], RequestLimits())
        # Separators are tokenised one by one, here written out.
        text = ["<|im_start|>user\n"]
        for number, count in enumerate(counts):
            first, second = 2 * number, 2 * number + 1
            before = "\n" if number else ""
            label = f"Frame {first + 1} sampled at {pixels.seconds[first]:.2f} seconds"
            if second < 7:
                label += f" and frame {second + 1} sampled at {pixels.seconds[second]:.2f} seconds"
            text += [f"{before}{label}: ", "<img>" + "<image>" * count + "</img>"]
        text.append("\nWhat?<|im_end|>\n<|im_start|>assistant\n")
        assert texts[-1] == "".join(text[1:-1])
        theirs = AutoTokenizer.from_pretrained(tiny.path)
        assert list(ids.ids) == [token for part in text for token in theirs(part).input_ids]


def test_files_that_transformers_saved_give_the_features_of_the_saved_class(tmp_path: Path) -> None:
    vision: Any = config_json(Tiny(depth=1))["vision_config"]
    text = {"model_type": "nemotron_h", "hidden_size": 64, "layers_block_type": ["mlp"], "vocab_size": 8,
            "intermediate_size": 8, "num_nextn_predict_layers": 1}  # fmt: skip
    torch.manual_seed(0)
    model = CLASSES.NemotronH_Omni_Reasoning_V3(
        CLASSES.NemotronH_Omni_Reasoning_V3_Config(
            vision_config=vision, text_config=text, vision_hidden_size=48, projector_hidden_size=96
        )
    ).eval()
    for name, weight in model.named_parameters():
        if "layer_scale" in name or "layernorm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor_json(Tiny())))
    checkpoint = Checkpoint.open(tmp_path)
    config = RECIPE.read_config(checkpoint)
    assert (config.final_norm, config.layer_scale) == ("stored", True)
    (image,) = random_items(RECIPE, config, [("image", (1, 4, 6))], seed=0)
    with torch.inference_mode():
        grids = torch.tensor([[4, 6]])
        wanted = model.get_image_features(image.patches[:, :768], grids).pooler_output[0]
        found = RECIPE.tower(checkpoint, "float32")(RECIPE.prepare(config, [image], "grouped"))["embeds"]
    assert relative_l2(found, wanted) < LIMIT
    assert relative_l2(RECIPE.reference(checkpoint).run([image])["embeds"], wanted) < LIMIT


def test_numbers_that_released_files_leave_out_are_those_of_the_class(tiny, tmp_path):
    def emptied(name: str, stored: dict[str, Any]) -> None:
        if name == "config.json":
            stored["vision_config"] = {"video_temporal_patch_size": 2}
            del stored["vit_hidden_size"], stored["projector_hidden_size"], stored["downsample_ratio"]
        else:
            stored.clear()

    config = RECIPE.read_config(changed(tiny, tmp_path, emptied))
    theirs: Any = CLASSES.NemotronH_Omni_Reasoning_V3_Config()
    vision = theirs.vision_config
    assert (config.depth, config.width, config.heads, config.eps) == (
        vision.num_hidden_layers, vision.hidden_size, vision.num_attention_heads, vision.layer_norm_eps,
    )  # fmt: skip
    assert config.inner == int(vision.hidden_size * vision.mlp_ratio)
    assert (config.learned, config.table_side) == (vision.num_summary_tokens, vision.max_img_size // 16)
    assert config.projector_width == theirs.projector_hidden_size
    assert (config.rule.patch, config.rule.temporal) == (vision.patch_size, vision.video_temporal_patch_size)
    assert (config.rule.mean, config.rule.std) == (tuple(vision.norm_mean), tuple(vision.norm_std))
    bounds = [each // 256 for each in (config.rule.image.min_pixels, config.rule.image.max_pixels)]
    assert bounds == [1024, 13312]


def test_settings_of_tiles_are_read_from_the_files_of_a_release(tiled: Checkpoint, tmp_path: Path) -> None:
    def released(name: str, stored: dict[str, Any]) -> None:
        if name == "config.json":
            # Besides sizes, as in files of RADIO's own code.
            stored["vision_config"] |= {
                "adaptor_names": None, "architectures": ["RADIOModel"], "feature_normalizer_config": None,
                "max_resolution": 128, "model_type": "", "preferred_resolution": [768, 768],
                "version": "radio_v2.5-h", "video_temporal_patch_size": 1, "vitdet_window_size": None,
            }  # fmt: skip
            stored["vision_config"]["args"]["model"] = "vit_huge_patch16_224"
            # No JSON, and in files of NVIDIA's Mamba decoders.
            stored["llm_config"]["time_step_limit"] = [0.0, math.inf]
            stored |= {"norm_mean": [0.5, 0.4, 0.3], "norm_std": [0.1, 0.2, 0.3]}
        else:
            stored.clear()

    checkpoint = changed(tiled, tmp_path, released)
    config = RECIPE.read_config(checkpoint)
    assert (config.rule.mean, config.rule.std) == ((0.5, 0.4, 0.3), (0.1, 0.2, 0.3))
    # The defaults of the released processor.
    assert (config.tiles, config.thumbnail, config.rule.image.max_pixels) == (12, True, 64 * 64)
    assert (config.learned, config.table_side, config.rule.temporal) == (5, 8, 1)
    assert RECIPE.parse_config(json.loads(json.dumps(encode(config)))) == config
    (image,) = random_items(RECIPE, config, [("image", (2, 4, 4))], seed=0)
    with torch.inference_mode():
        found = RECIPE.tower(checkpoint, "float32")(RECIPE.prepare(config, [image], "grouped"))["embeds"]
    assert relative_l2(found, RECIPE.reference(checkpoint).run([image])["embeds"]) < LIMIT


def changed(
    checkpoint: Checkpoint, folder: Path, change: Callable[[str, dict[str, Any]], None]
) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    for path in checkpoint.path.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "preprocessor_config.json"):
        stored = json.loads((folder / name).read_text())
        change(name, stored)
        (folder / name).write_text(json.dumps(stored))
    return Checkpoint.open(folder)
