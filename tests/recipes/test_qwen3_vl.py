"""Qwen3-VL, a family with levels and written-out time: towers in all layouts, requests of another runtime."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image as Picture
from safetensors.torch import load_file, save_file
from vlexport.recipes.demo.qwen3_vl import Tiny, contents, processor_json
from vlexport.recipes.demo.writing import write_checkpoint

from tests.backends.towers import NATIVE
from tests.changed_recipes import with_tower
from tests.cli.lines import vlexport
from tests.golden_data import FOLDER, cases
from tests.golden_towers import items_of
from tests.subjects import subject_of
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.errors import CheckpointError, InputError, UnsupportedError
from vlexport.parity.check import curve_of
from vlexport.parity.diagnosis import ORDER, VALUE
from vlexport.parity.metrics import compare
from vlexport.parity.noise import in_dtype
from vlexport.parity.samples import random_items
from vlexport.recipe import LanguageRule, PromptItem, find_recipe, recipe_for
from vlexport.runtime.decoder import DecoderOptions, load_language
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels
from vlexport.testing import in_torch
from vlexport.vision.attention.layout import LAYOUTS

build = importlib.import_module("vlexport._build.build")
E2E = FOLDER / "e2e_qwen3_vl"
CASES: list[dict[str, Any]] = json.loads((E2E / "cases.json").read_text())
TRUTHS = [case for case in CASES if case["truth"]]
# The processor that recorded it resized with another library: begin from its own patches.
FROM_PATCHES = {"image_resized"}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(E2E / "checkpoint")


@pytest.fixture(
    scope="module",
    params=[
        # Planted bugs of the runtime are judged by this one.
        "eager",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("onnxruntime", "openvino", "inductor")),
    ],
)
def pipelines(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, shared: Path
) -> Callable[[dict[str, Any]], Pipeline]:
    """The pipeline of a case's prompt layout, on one engine."""
    spec = build.request(checkpoint, backend=request.param, into=shared / "engines")
    bundle = build.build_checkpoint(spec).require_passed()
    outer = load(bundle.path, decoder=checkpoint)
    options = RuntimeOptions(prompt_layout="bare")
    bare = Pipeline(outer.bundle, outer.engine, outer.recipe, outer.language, options)
    return lambda case: {"outer": outer, "bare": bare}[case["layout"]]


def source(case: dict[str, Any], tensors: dict[str, torch.Tensor], index: int) -> Pixels | MediaItem:
    about = case["media"][index]
    if case["name"] in FROM_PATCHES:
        return items_of(tensors["media0.pixel_values"], [tensors["media0.grid_thw"].tolist()])[0]
    raw = tensors.get(f"media{index}.raw")
    if raw is None:  # pixels of cases without truth were not kept
        random = torch.Generator().manual_seed(index)
        raw = torch.randint(0, 256, about["shape"], dtype=torch.uint8, generator=random)
    seconds = tuple(at / about["fps"] for at in about["frames_indices"] or ())
    frames = raw if raw.ndim == 4 else raw[None]
    return Pixels(kind=about["kind"], frames=frames, frames_per_second=about["fps"], seconds=seconds)


def recorded(case: dict[str, Any]) -> tuple[Request, dict[str, torch.Tensor]]:
    """The request of a case as it was put, and what was recorded."""
    tensors = load_file(E2E / case["file"]) if case["file"] else {}
    media: dict[str, list[Pixels | MediaItem]] = {"image": [], "video": []}
    for index, about in enumerate(case["media"]):
        media[about["kind"]].append(source(case, tensors, index))
    generation = Generation(max_new_tokens=32, prefill_chunk=case["chunk_budget"])
    request = Request(
        raw_prompt=case["prompt"],
        images=media["image"],
        videos=media["video"],
        prune=case["q"] or None,
        generation=generation,
    )
    return request, tensors


def test_prompts_masks_positions_and_tokens_equal_the_recorded_ones(pipelines, subtests) -> None:
    for case in TRUTHS:
        with subtests.test(case["name"]):
            request, tensors = recorded(case)
            answer = pipelines(case).generate(request)
            assert list(answer.prompt_token_ids) == case["prompt_token_ids"]
            assert list(answer.kept) == case["retained"]
            for index, item in enumerate(answer.media):
                assert (item.mask is None) == (f"media{index}.mask" not in tensors)
                assert item.mask is None or torch.equal(item.mask, tensors[f"media{index}.mask"])
            assert torch.equal(answer.positions, tensors["positions"])
            assert answer.delta == case["delta"]
            assert list(answer.token_ids) == case["token_ids"]
            laid_out = answer.forms.pop("layout", "")
            assert bool(laid_out) == (case["q"] > 0 and "video" in {each["kind"] for each in case["media"]})
            assert set(answer.forms.values()) <= {"compiled"}


def test_requests_among_others_get_the_tokens_they_get_alone(pipelines) -> None:
    chosen = [case for case in TRUTHS if case["layout"] == "outer"]
    pipeline = pipelines(chosen[0])
    pipeline.encoder.cache.clear()
    outcomes = pipeline.generate_all([recorded(case)[0] for case in chosen])
    assert [list(one.token_ids) for one in outcomes] == [case["token_ids"] for case in chosen]


def plain_positions(answer: Answer, ids: dict[str, int]) -> list[list[int]]:
    """The plain rule: the whole prompt's table, token by token, without the columns of dropped tokens."""
    columns, free, prompt = list[list[int]](), 0, list(answer.prompt_token_ids)
    media, column, frame = iter(answer.media), 0, 0
    item = None
    while column < len(prompt):
        if prompt[column] != ids["start"] or prompt[column + 1] == ids["text"]:
            columns.append([free] * 3)
            free, column = free + 1, column + 1
            continue
        # A vision start that an image, or a frame of a video, follows.
        if item is None or frame == item.grid[0]:
            item, frame = next(media), 0
        columns.append([free] * 3)
        rows, width = item.grid[1] // 2, item.grid[2] // 2
        cells = list(range(rows * width))
        if item.mask is not None:
            cells = item.mask.view(item.grid[0], -1)[frame].nonzero().flatten().tolist()
        columns += [[free + 1, free + 1 + cell // width, free + 1 + cell % width] for cell in cells]
        column += 1 + len(cells)
        free, frame = free + 1 + max(rows, width), frame + 1
    return [list(row) for row in zip(*columns, strict=True)]


def test_requests_that_break_the_other_runtime_follow_the_plain_rule(pipelines, subtests) -> None:
    for case in CASES:
        if case["truth"]:
            continue
        with subtests.test(case["name"]):
            pipeline = pipelines(case)
            id_of = pipeline.language.tokenizer.id_of
            answer = pipeline.generate(recorded(case)[0])
            prompt = list(answer.prompt_token_ids)
            # Outside a frame a vision start is followed by a timestamp, which begins with this token.
            stamp = pipeline.language.tokenizer.encode("<0.2 seconds>", add_special=False).ids[0]
            expected = plain_positions(answer, {"start": id_of("<|vision_start|>"), "text": stamp})
            assert answer.positions.tolist() == expected
            assert answer.delta == max(map(max, expected)) + 1 - len(prompt)
            pads = [prompt.count(id_of(f"<|{kind}_pad|>")) for kind in ("image", "video")]
            assert sum(pads) == sum(answer.kept)
            for item in answer.media:
                if item.kind == "video":
                    assert item.mask is not None
                    assert frame_counts(prompt, id_of) == item.mask.view(item.grid[0], -1).sum(1).tolist()


def frame_counts(prompt: list[int], id_of: Callable[[str], int]) -> list[int]:
    """How many video tokens are behind each vision start that no image and no timestamp follows."""
    start, end, video, image = (
        id_of(f"<|{name}|>") for name in ("vision_start", "vision_end", "video_pad", "image_pad")
    )
    at = [place for place, each in enumerate(prompt) if each == start]
    frames = [place for place in at if prompt[place + 1] in (video, end)]
    assert image in prompt or len(at) - len(frames) <= 1
    return [prompt.index(end, place) - place - 1 for place in frames]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 16, 64))])
@pytest.mark.parametrize("name", ["image_then_video", "evs_outer_q50", "evs_image_then_video_q75"])
def test_tokens_do_not_depend_on_the_size_of_prefill_chunks(pipelines, name: str, chunk: int) -> None:
    case = next(case for case in TRUTHS if case["name"] == name)
    request, _ = recorded(case)
    request = replace(request, generation=replace(request.generation, prefill_chunk=chunk))
    assert list(pipelines(case).generate(request).token_ids) == case["token_ids"]


def test_embeddings_that_were_made_before_answer_alike(pipelines) -> None:
    case = next(case for case in TRUTHS if case["name"] == "evs_outer_q50")
    pipeline, (request, _) = pipelines(case), recorded(case)
    (video,) = pipeline.encode(videos=list(request.videos), prune=case["q"])
    assert video.layers["level_0"].shape == video.layers["level_1"].shape == video.embeds.shape
    again = replace(request, videos=[video])
    assert list(pipeline.generate(again).token_ids) == case["token_ids"]
    with pytest.raises(InputError, match="layers none given, level_0, level_1 expected"):
        pipeline.generate(replace(request, videos=[replace(video, layers={})]))
    short = {name: rows[1:] for name, rows in video.layers.items()}
    with pytest.raises(InputError, match="video level_0: 11 rows given, as many as embeddings expected"):
        pipeline.generate(replace(request, videos=[replace(video, layers=short)]))


def test_a_video_without_times_is_encoded_but_not_put_into_a_prompt(pipelines) -> None:
    case = next(case for case in TRUTHS if case["name"] == "video_fps2")
    pipeline, (request, _) = pipelines(case), recorded(case)
    (given,) = request.videos
    assert isinstance(given, Pixels)
    untimed = replace(given, frames_per_second=None, seconds=())
    assert pipeline.encode(videos=[untimed], prune=0.5)[0].frame_seconds == ()
    with pytest.raises(InputError, match=r"times of 0 frames given, 4 expected.*as fps"):
        pipeline.generate(replace(request, videos=[untimed]))


def test_texts_of_pruned_videos_are_the_recorded_layouts(checkpoint: Checkpoint) -> None:
    """Frame by frame once the mask is known; with all kept tokens in the first frame before that."""
    recipe = recipe_for(checkpoint)
    config, prompt = recipe.read_config(checkpoint), cast(LanguageRule[Any], recipe.language).prompt
    names = {"<|vision_start|>": [7], "<|vision_end|>": [8], "<|video_pad|>": [6]}
    for case in cases("q3_expanded"):
        frames, kept = case.meta["thw"][0], int(case.inputs["mask"].sum())
        video = MediaItem(
            kind="video",
            patches=torch.zeros(0, 0),
            grid=tuple(case.meta["thw"]),
            frame_seconds=tuple(map(float, range(frames))),
        )
        stamps = {f"<{at:.1f} seconds>": ids for at, ids in enumerate(case.meta["timestamp_ids"])}
        layouts = {
            "ids": tuple(case.outputs["tokens_per_frame"].tolist()),
            "lumped_ids": (kept, *[0] * (frames - 1)),
        }
        for name, rows in layouts.items():
            item = PromptItem(item=video, number=0, num_rows=kept, count_frames=partial(tuple, rows))
            pieces = re.findall("<.*?>", prompt.expand(config, item))
            written = [each for piece in pieces for each in (names | stamps)[piece]]
            assert written == case.outputs[name].tolist()


def test_a_prompt_layout_that_the_family_does_not_have_is_refused(pipelines) -> None:
    pipeline = pipelines(TRUTHS[0])
    options = RuntimeOptions(prompt_layout="inner")
    with pytest.raises(InputError, match=r"prompt layout 'inner' given. Known: bare\."):
        Pipeline(pipeline.bundle, pipeline.engine, pipeline.recipe, pipeline.language, options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tower_equals_the_recorded_outputs_and_levels_in_every_layout(
    tmp_path: Path, layout: str
) -> None:
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tower_equals_that_of_the_other_runtime(checkpoint: Checkpoint, layout: str) -> None:
    recipe = recipe_for(checkpoint)
    config, tower = recipe.read_config(checkpoint), recipe.tower(checkpoint, "float32")
    for case in TRUTHS[:12]:
        tensors = load_file(E2E / case["file"])
        for index, about in enumerate(case["media"]):
            name = "pixel_values" if about["kind"] == "image" else "pixel_values_videos"
            grid = tensors[f"media{index}.grid_thw"].tolist()
            (item,) = items_of(tensors[f"media{index}.{name}"], [grid])
            with torch.inference_mode():
                found = tower(recipe.prepare(config, [replace(item, kind=about["kind"])], layout))
            joined = torch.cat(list(found.values()), dim=1)
            # transformers' own tower is off by 6e-6 from these.
            torch.testing.assert_close(joined, tensors[f"media{index}.tower_out"], rtol=0, atol=1e-4)


def test_pixels_equal_those_of_the_recorded_processor(checkpoint: Checkpoint) -> None:
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    for case in TRUTHS:
        tensors = load_file(E2E / case["file"])
        for index, about in enumerate(case["media"]):
            pixels = source(case, tensors, index)
            if isinstance(pixels, MediaItem):
                continue
            item = recipe.preprocess(config, pixels)
            name = "pixel_values" if about["kind"] == "image" else "pixel_values_videos"
            assert item.grid == tuple(tensors[f"media{index}.grid_thw"].tolist()), case["name"]
            torch.testing.assert_close(item.patches, tensors[f"media{index}.{name}"], rtol=0, atol=1e-6)
            if about["kind"] == "video":
                assert list(item.frame_seconds) == tensors[f"media{index}.seconds"].tolist()


def test_items_give_the_same_tokens_and_levels_together_as_apart(checkpoint: Checkpoint) -> None:
    recipe = recipe_for(checkpoint)
    config, tower = recipe.read_config(checkpoint), recipe.tower(checkpoint, "float32")
    items = random_items(recipe, config, recipe.shape_sets(config)["films"], seed=0)
    for layout in LAYOUTS:
        with torch.inference_mode():
            together = tower(recipe.prepare(config, items, layout))
            apart = [tower(recipe.prepare(config, [item], layout)) for item in items]
        for name, rows in together.items():
            # Sums over other batch sizes.
            torch.testing.assert_close(rows, torch.cat([one[name] for one in apart]), rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_limits_are_above_what_transformers_loses_in_as_many_blocks_as_releases_have(
    tmp_path: Path, dtype: str
) -> None:
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


def test_a_config_survives_its_json(checkpoint: Checkpoint) -> None:
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    assert recipe.parse_config(json.loads(json.dumps(encode(config)))) == config


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("deepstack_visual_indexes", [2, 1], "ascending numbers of the 4 blocks"),
        ("deepstack_visual_indexes", [1, 4], "ascending numbers of the 4 blocks"),
        ("num_position_embeddings", 60, "a square number"),
        ("hidden_act", "silu", "gelu_pytorch_tanh"),
    ],
)
def test_numbers_that_the_tower_cannot_have_are_refused_by_name(tmp_path, field, value, expected) -> None:
    config = json.loads((E2E / "checkpoint" / "config.json").read_text())
    config["vision_config"][field] = value
    for path in (E2E / "checkpoint").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=expected) as raised:
        find_recipe("qwen3_vl").read_config(Checkpoint.open(tmp_path))
    assert field in str(raised.value)


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
    spec = build.request(Checkpoint.open(path), backend="eager", into=tmp_path / "engines")
    bundle = build.build_checkpoint(spec).require_passed()
    random = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (1, 96, 64, 3), dtype=torch.uint8, generator=random)
    video = torch.randint(0, 256, (5, 64, 96, 3), dtype=torch.uint8, generator=random)
    with load(bundle.path, decoder=path) as pipeline:
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
    words = ("--decoder", path, "--prompt", "What?", "--image", tmp_path / "image.png")
    ran = vlexport("run", bundle.path, *words, "--max-new-tokens", 16, "--json")
    assert ran.code == 0, ran.err
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words", "status"),
    [
        ("eager", ("--dtype", "bfloat16"), "passed"),
        ("eager", ("--input", "uint8"), "passed"),
        ("onnxruntime", (), "passed"),
        ("onnxruntime", ("--quantize", "int8"), "passed"),
        # Qwen2-VL's are in the slow part.
        pytest.param("openvino", (), "passed", marks=pytest.mark.full),
        pytest.param("openvino", ("--quantize", "int8"), "passed", marks=pytest.mark.full),
        pytest.param("openvino", ("--dtype", "bfloat16"), "passed", marks=[NATIVE, pytest.mark.full]),
        pytest.param("inductor", (), "passed", marks=pytest.mark.full),
        pytest.param("inductor", ("--dtype", "bfloat16"), "passed", marks=pytest.mark.full),
        ("tensorrt_rtx", ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "float32"), "not_run"),
        ("tensorrt_rtx", ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "bfloat16"), "not_run"),
        ("tensorrt_rtx", ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "float16"), "not_run"),
    ],
)
def test_the_demo_checkpoint_builds_in_every_precision(tmp_path, backend, words, status) -> None:
    if missing := find_backend(backend).missing():
        pytest.skip(missing)
    tiny = Tiny(depth=2, levels=(0,), with_decoder=False)
    checkpoint = write_checkpoint(tmp_path / "tiny", contents(tiny), seed=0)
    ran = vlexport("build", checkpoint, "--backend", backend, *words, "--output-dir", tmp_path / "engines")
    assert ran.code == 0, ran.err
    assert f", {status}\n" in ran.err
