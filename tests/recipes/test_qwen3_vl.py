"""Qwen3-VL, a family with levels: recorded towers, wrong levels, decoders, answers of transformers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Picture
from safetensors.torch import save_file
from vlexport.recipes.demo.qwen3_vl import Tiny, contents, processor_json
from vlexport.recipes.demo.writing import write_checkpoint

from tests.changed_recipes import with_tower
from tests.cli.lines import vlexport
from tests.golden_data import FOLDER, cases
from tests.golden_towers import items_of
from tests.subjects import subject_of
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.parity.check import curve_of
from vlexport.parity.diagnosis import ORDER, VALUE
from vlexport.parity.metrics import compare
from vlexport.parity.noise import in_dtype
from vlexport.parity.samples import random_items
from vlexport.recipe import find_recipe, recipe_for
from vlexport.runtime.decoder import DecoderOptions, load_language
from vlexport.runtime.pipeline import load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels
from vlexport.testing import in_torch
from vlexport.vision.attention.layout import LAYOUTS

build = importlib.import_module("vlexport._build.build")
E2E = FOLDER / "e2e_qwen3_vl"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(E2E / "checkpoint")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tower_equals_the_recorded_outputs_and_levels_in_every_layout(tmp_path, layout):
    (weights,) = cases("q3_tower", "weights")
    vision = {**weights.meta["config"], "model_type": "qwen3_vl"}
    config = {"model_type": "qwen3_vl", "vision_config": vision, "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(processor_json("image") | {"patch_size": 4})
    )
    tensors = {f"model.visual.{name}": tensor for name, tensor in weights.inputs.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint, recipe = Checkpoint.open(tmp_path), find_recipe("qwen3_vl")
    settings, tower = recipe.read_config(checkpoint), recipe.tower(checkpoint, "float32")
    runs = list(cases("q3_tower", "run"))
    assert len(runs) == 6
    for run in runs:
        items = items_of(run.inputs["pixels"], run.meta["grids"])
        with torch.inference_mode():
            found = tower(recipe.prepare(settings, items, layout))
        assert list(found) == ["embeds", "level_0", "level_1"]
        joined = torch.cat(list(found.values()), dim=1)
        torch.testing.assert_close(joined, run.outputs["out"], rtol=0, atol=1e-5)


def test_the_position_table_is_resized_as_recorded(tmp_path: Path) -> None:
    (weights,) = cases("q3_tower", "weights")
    side = int(weights.meta["config"]["num_position_embeddings"] ** 0.5)
    module = importlib.import_module("vlexport.recipes.qwen3_vl")
    tower = module.Tower(recipe_config(side=side, width=weights.meta["config"]["hidden_size"]))
    tower.pos_embed.weight = torch.nn.Parameter(weights.inputs["pos_embed.weight"], requires_grad=False)
    for run in cases("q3_tower", "run"):
        tables = tower.packing.prepare(items_of(run.inputs["pixels"], run.meta["grids"]), "grouped")
        found = tower.places(tables["positions"], tables["sides"])
        torch.testing.assert_close(found, run.outputs["pos_embeds"], rtol=0, atol=1e-5)


def recipe_config(side: int, width: int) -> Any:
    """A config of the recorded sizes, without a checkpoint."""
    checkpoint = Checkpoint.open(E2E / "checkpoint")
    known = recipe_for(checkpoint).read_config(checkpoint)
    rule = replace(known.rule, patch=4)
    return replace(known, depth=1, level_blocks=(), heads=2, width=width, table_side=side, rule=rule)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_limits_are_above_what_transformers_loses_in_as_many_blocks_as_releases_have(tmp_path, dtype):
    tiny = Tiny(depth=27, levels=(8, 16, 24), with_decoder=False)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny", contents(tiny), seed=0))
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    items = random_items(recipe, config, recipe.shape_sets(config)["mix"], seed=0)
    exact = recipe.reference(checkpoint).run(items)
    rounded = in_dtype(recipe.reference(checkpoint), items, dtype)
    lost = [compare(rounded[name].float(), rows) for name, rows in exact.items()]
    limit = recipe.limits[dtype]
    for name in ("relative_l2", "worst_token"):
        worst = max(getattr(each, name) for each in lost)
        assert 1.2 * worst < getattr(limit, name) < 3 * worst


def spoil_weights(tower: Any) -> None:
    tower.deepstack_merger_list[0].mlp[2].weight.data.mul_(1.01)


def exchange_levels(tower: Any) -> None:
    tower.deepstack_merger_list = tower.deepstack_merger_list[::-1]


def leave_in_order_of_blocks(tower: Any) -> None:
    tower.level = lambda name, x, _: tower.deepstack_merger_list[list(tower.levels).index(name)](x)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("change", "cause"),
    [(None, ""), (spoil_weights, VALUE), (exchange_levels, VALUE), (leave_in_order_of_blocks, ORDER)],
)
def test_a_wrong_level_is_the_first_bad_stage(checkpoint: Checkpoint, change, cause: str) -> None:
    recipe = recipe_for(checkpoint)
    subject = subject_of(checkpoint, recipe=with_tower(recipe, change) if change else recipe)
    with in_torch(subject_of(checkpoint)) as engine:
        curve = curve_of(subject, engine.spec.profile, engine.inputs)
    assert curve is not None
    stages = [point.stage for point in curve.points]
    assert stages == ["begin", *(f"block {at:02d}" for at in range(4)), "level_0", "level_1", "embeds"]
    assert curve.first_bad == ("level_0" if change else None)
    assert curve.cause.split(":")[0] == cause


def as_released(made):
    """The same contents, with rotary settings as the first released checkpoints spell them."""
    text = dict(made.config["text_config"])
    scaling = dict(text.pop("rope_parameters"))
    text |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    return replace(made, config={**made.config, "text_config": text})


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "moe"])
@pytest.mark.parametrize("released", [True, False])
def test_decoders_with_levels_equal_those_of_transformers(tmp_path, experts: int, released: bool) -> None:
    import transformers

    made = contents(Tiny(depth=1, levels=(0,), experts=experts))
    path = write_checkpoint(tmp_path / "tiny", as_released(made) if released else made, seed=0)
    kind = f"Qwen3VL{'Moe' if experts else ''}ForConditionalGeneration"
    theirs = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()
    checkpoint = Checkpoint.open(path)
    language = recipe_for(checkpoint).language
    assert language is not None
    decoder = load_language(checkpoint, language, DecoderOptions()).decoder
    random = torch.Generator().manual_seed(0)
    embeds, level = (torch.randn(11, decoder.width, generator=random) for _ in range(2))
    is_media = torch.tensor([at in (2, 3, 4, 7) for at in range(11)])
    positions = torch.randint(0, 9, (3, 11), generator=random).cummax(1).values
    with torch.inference_mode():
        rows = theirs.model.language_model(
            inputs_embeds=embeds[None],
            position_ids=positions[:, None],
            visual_pos_masks=is_media[None],
            deepstack_visual_embeds=[level[is_media]],
        ).last_hidden_state
        expected = theirs.lm_head(rows)[0]
    levels = (level * is_media[:, None])[None]
    for cuts in ((0, 11), (0, 3, 4, 11)):
        turn = decoder.begin(11)
        for start, stop in pairwise(cuts):
            chunk = slice(start, stop)
            found = turn.step(embeds[chunk], positions[:, chunk], levels[:, chunk])
            # Sums over other batch sizes.
            torch.testing.assert_close(found, expected[stop - 1], rtol=0, atol=2e-5)
    if experts:
        with pytest.raises(UnsupportedError, match="chooses experts"):
            load_language(checkpoint, language, DecoderOptions(compile=True))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "moe"])
def test_answers_equal_those_of_transformers(tmp_path, experts: int) -> None:
    import transformers

    path = write_checkpoint(tmp_path / "tiny", contents(Tiny(experts=experts)), seed=0)
    kind = f"Qwen3VL{'Moe' if experts else ''}ForConditionalGeneration"
    theirs = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()
    spec = build.request(Checkpoint.open(path), backend="eager", output_dir=tmp_path / "engines")
    bundle = build.build_checkpoint(spec).require_passed()
    random = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (1, 96, 64, 3), dtype=torch.uint8, generator=random)
    video = torch.randint(0, 256, (5, 64, 96, 3), dtype=torch.uint8, generator=random)
    with load(bundle.path, checkpoint=path) as pipeline:
        pixels = (
            Pixels(kind="image", frames=image),
            Pixels(kind="video", frames=video, frames_per_second=3.0),
        )
        items = [pipeline.preprocess(each) for each in pixels]
        question = Request(
            prompt="What is it?",
            images=[pixels[0]],
            videos=[pixels[1]],
            generation=Generation(max_new_tokens=16, ignore_end=True),
        )
        answer = pipeline.generate(question)
    assert list(answer.token_ids) == generated(theirs, answer.prompt_token_ids, items)
    # The command prints what the library returns.
    Picture.fromarray(image[0].numpy()).save(tmp_path / "image.png")
    words = ("--checkpoint", path, "--prompt", "What?", "--image", tmp_path / "image.png")
    ran = vlexport("run", bundle.path, *words, "--max-new-tokens", 16, "--json").ends(0)
    printed = json.loads(ran.out)
    assert printed["token_ids"] == generated(theirs, printed["prompt_token_ids"], items[:1])


def generated(theirs: Any, prompt: Sequence[int], items: Sequence[MediaItem]) -> list[int]:
    """Return 16 greedy tokens of transformers."""
    ids = torch.tensor([prompt])
    kinds = (ids == theirs.config.image_token_id).int() + 2 * (ids == theirs.config.video_token_id).int()
    media = {}
    for name, item in zip(("image", "video"), items, strict=False):
        media[f"{name}_grid_thw"] = torch.tensor([item.grid])
        media["pixel_values" if name == "image" else "pixel_values_videos"] = item.patches
    made = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **media,
        mm_token_type_ids=kinds,
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
    )
    found: list[int] = made[0, ids.shape[1] :].tolist()
    return found
