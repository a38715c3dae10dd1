"""Nemotron-Nano-VL: the tower against transformers' class in all layouts, its files, and its bundles."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vlexport.recipes.demo.nemotron_vl import Tiny, config_json, contents, processor_json, token
from vlexport.recipes.demo.writing import write_checkpoint

from tests.backends.towers import NATIVE
from tests.cli.lines import vlexport
from tests.mutation.trials import TRIALS
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.errors import CheckpointError, InputError, LimitError
from vlexport.parity.samples import random_items
from vlexport.recipe import find_recipe
from vlexport.runtime.pipeline import load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels
from vlexport.testing import check_recipe
from vlexport.vision.attention.layout import LAYOUTS

CLASSES: Any = pytest.importorskip(
    "transformers.models.nemotron_h_omni.modeling_nemotron_h_omni",
    reason="transformers has no nemotron_h_omni",
)
build = importlib.import_module("vlexport._build.build")
RECIPE = find_recipe("nemotron_vl")
LIMIT = RECIPE.limits["float32"].relative_l2
TILES = TRIALS["nemotron_vl"]["tiles"]
RTX = ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "float32")
# None of these is among the mixes that graphs are traced with; frames differ in length and kind.
MIX = [("video", (2, 2, 6)), ("image", (1, 10, 4)), ("image", (1, 2, 2)), ("video", (1, 4, 4))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = contents(Tiny(depth=2))
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("nemotron") / "tiny", made, seed=0))


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = contents(TILES)
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("nemotron") / "tiled", made, seed=0))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("name", "mix"), [("tiny", MIX), ("tiled", [("image", (7, 4, 4)), *MIX, ("image", (3, 4, 4))])]
)
def test_a_mix_of_images_and_videos_equals_the_class_in_every_layout(
    name: str, mix: Any, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(name)
    config, tower = RECIPE.read_config(checkpoint), RECIPE.tower(checkpoint, "float32")
    reference, items = RECIPE.reference(checkpoint), random_items(RECIPE, config, mix, seed=0)
    wanted = reference.run(items)["embeds"]
    for layout in LAYOUTS:
        with torch.inference_mode():
            together = tower(RECIPE.prepare(config, items, layout))["embeds"]
            apart = [tower(RECIPE.prepare(config, [item], layout))["embeds"] for item in items]
        assert relative(together, wanted) < LIMIT
        # Sums over other batch sizes.
        assert relative(torch.cat(apart), wanted) < LIMIT


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
    assert relative(found, wanted) < LIMIT
    assert relative(RECIPE.reference(checkpoint).run([image])["embeds"], wanted) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [Tiny(depth=2), Tiny(depth=1, final_norm=True, scaled=True, temporal=3), TILES]
)
def test_the_recipe_conforms(tmp_path: Path, sizes: Tiny) -> None:
    report = check_recipe("nemotron_vl", write_checkpoint(tmp_path / "tiny", contents(sizes), seed=0))
    assert report.passed, report.table()


def test_a_config_survives_its_json(tiny: Checkpoint) -> None:
    config = RECIPE.read_config(tiny)
    assert RECIPE.parse_config(json.loads(json.dumps(encode(config)))) == config


def test_numbers_that_released_files_leave_out_are_those_of_the_class(
    tiny: Checkpoint, tmp_path: Path
) -> None:
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
    assert relative(found, RECIPE.reference(checkpoint).run([image])["embeds"]) < LIMIT


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("config.json", "ps_version", "v1"),
        ("config.json", "ps_version", None),
        ("config.json", "force_image_size", None),
        ("config.json", "force_image_size", 80),
        ("config.json", "vision_config.args.model", "vit_large_patch16_224"),
        ("config.json", "vision_config.args.min_num_patches", 1024),
        ("config.json", "vision_config.video_temporal_patch_size", 2),
        ("config.json", "vision_config.vitdet_window_size", 16),
        ("preprocessor_config.json", "image_size", 32),
        ("preprocessor_config.json", "use_thumbnail", False),
        ("preprocessor_config.json", "norm_mean", None),
    ],
)
def test_tiles_of_no_release_are_refused(
    tiled: Checkpoint, tmp_path: Path, file: str, name: str, value: object
) -> None:
    def change(given: str, stored: dict[str, Any]) -> None:
        *sections, key = name.split(".")
        for section in sections:
            stored = stored[section] if given == file else {}
        if given == file:
            stored[key] = value

    with pytest.raises(CheckpointError, match="expected"):
        RECIPE.read_config(changed(tiled, tmp_path, change))


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


@pytest.mark.parametrize(
    ("file", "section", "name", "value"),
    [
        ("config.json", "vision_config", "use_swiglu_ffn", True),
        ("config.json", "vision_config", "hidden_act", "relu"),
        ("config.json", "vision_config", "num_attention_heads", 5),
        ("config.json", "vision_config", "layerscale_value", 0.5),
        ("config.json", "vision_config", "video_temporal_patch_size", None),
        ("preprocessor_config.json", None, "patch_size", 14),
    ],
)
def test_what_no_release_has_is_refused(
    tiny: Checkpoint, tmp_path: Path, file: str, section: str | None, name: str, value: object
) -> None:
    def change(given: str, stored: dict[str, Any]) -> None:
        if given == file:
            (stored[section] if section else stored)[name] = value

    with pytest.raises(CheckpointError, match=r"'.*(size|act|ffn|value)'"):
        RECIPE.read_config(changed(tiny, tmp_path / "changed", change))


def test_media_that_no_call_holds_are_refused(tiny: Checkpoint) -> None:
    config = RECIPE.read_config(tiny)
    for frames, kind, error in (
        (torch.zeros(2, 32, 32, 3), "image", InputError),
        (torch.zeros(1, 1, 201, 3), "image", LimitError),
        (torch.zeros(1, 4096, 2, 3), "video", LimitError),
    ):
        with pytest.raises(error, match="expected"):
            RECIPE.preprocess(config, Pixels(kind=kind, frames=frames.to(torch.uint8)))
    with pytest.raises(InputError, match="patches of shape"):
        RECIPE.prepare(
            config, [MediaItem(kind="image", patches=torch.zeros(4, 768), grid=(1, 2, 2))], "grouped"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype", "sizes"),
    [
        ("onnxruntime", "float32", Tiny(depth=1)),
        ("openvino", "float32", Tiny(depth=1)),
        ("inductor", "float32", Tiny(depth=1)),
        ("eager", "bfloat16", Tiny(depth=1)),
        ("onnxruntime", "float32", TILES),
        ("openvino", "float32", TILES),
        ("eager", "bfloat16", TILES),
        pytest.param("openvino", "bfloat16", TILES, marks=NATIVE),
    ],
)
def test_bundles_encode_and_prune_what_they_were_not_traced_with(
    tmp_path: Path, backend: str, dtype: str, sizes: Tiny
) -> None:
    if missing := find_backend(backend).missing():
        pytest.skip(missing)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny", contents(sizes), seed=0))
    spec = build.request(checkpoint, backend=backend, dtype=dtype, into=tmp_path / "engines")
    bundle = build.build_checkpoint(spec).require_passed()
    source = torch.Generator().manual_seed(0)
    pixels = {
        kind: [
            Pixels(
                kind=kind,
                frames=torch.randint(256, (*sides, 3), dtype=torch.uint8, generator=source),
                frames_per_second=4.0 if kind == "video" else None,
            )
            for sides in ((frames, 61, 120), (frames, 300, 45))
        ]
        for kind, frames in (("image", 1), ("video", 5))
    }
    given: Any = {"images": pixels["image"], "videos": pixels["video"]}
    config, pipeline = RECIPE.read_config(checkpoint), load(bundle.path, decoder=checkpoint)
    items = [RECIPE.preprocess(config, each) for each in (*pixels["image"], *pixels["video"])]
    wanted = RECIPE.reference(checkpoint).run(items)["embeds"]
    whole, left = pipeline.encode(**given), pipeline.encode(**given, prune=0.6)
    found = torch.cat([item.embeds.float() for item in whole])
    assert relative(found, wanted) < RECIPE.limits[dtype].relative_l2
    for before, after in zip(whole, left, strict=True):
        kept = torch.arange(len(before.embeds)) if after.kept is None else after.kept
        assert (len(kept) < len(before.embeds)) == (before.kind == "video")
        assert torch.equal(after.embeds, before.embeds[kept])
    if dtype != "float32":
        return
    request = Request(prompt="Which?", **given, prune=0.6, generation=Generation(max_new_tokens=16))
    chunks = replace(request, generation=Generation(max_new_tokens=16, prefill_chunk=37))
    answer, other = pipeline.generate(request), pipeline.generate(chunks)
    ids = torch.tensor([answer.prompt_token_ids])
    # Weights depend on seed and name, so this has the decoder of tiles too, whose own class is remote code.
    known = write_checkpoint(tmp_path / "known", contents(Tiny(depth=1)), seed=0)
    model = CLASSES.NemotronH_Omni_Reasoning_V3.from_pretrained(known).eval().language_model
    embeds = model.get_input_embeddings()(ids)
    embeds[ids == token("<image>")] = torch.cat([item.embeds for item in left])
    # The class generates from ids alone, so its steps are taken here, each over all tokens.
    theirs = list[int]()
    with torch.inference_mode():
        for _ in answer.token_ids:
            logits = model(inputs_embeds=embeds, use_cache=False).logits
            theirs.append(int(logits[0, -1].argmax()))
            last = model.get_input_embeddings()(torch.tensor([theirs[-1:]]))
            embeds = torch.cat([embeds, last], dim=1)
    assert list(answer.token_ids) == theirs
    assert other.token_ids == answer.token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words", "status", "sizes"),
    [
        ("onnxruntime", ("--quantize", "int8"), "passed", Tiny(depth=1)),
        ("tensorrt_rtx", RTX, "not_run", Tiny(depth=1)),
        ("tensorrt_rtx", RTX, "not_run", TILES),
    ],
)
def test_the_demo_checkpoint_builds_in_other_ways(
    tmp_path: Path, backend: str, words: tuple[str, ...], status: str, sizes: Tiny
) -> None:
    if missing := find_backend(backend).missing():
        pytest.skip(missing)
    made = contents(replace(sizes, with_decoder=False))
    checkpoint = write_checkpoint(tmp_path / "tiny", made, seed=0)
    ran = vlexport("build", checkpoint, "--backend", backend, *words, "--output-dir", tmp_path / "engines")
    assert ran.code == 0, ran.err
    assert f", {status}\n" in ran.err
