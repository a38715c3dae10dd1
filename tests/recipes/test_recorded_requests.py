"""Requests of Qwen2-VL and Qwen3-VL that another runtime answered: towers, pixels, positions, tokens."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from tests.golden_data import FOLDER, cases
from tests.golden_towers import items_of
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request as build_request
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError
from vlexport.recipe import LanguageRule, PromptItem, recipe_for
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.attention.layout import LAYOUTS

FOLDERS = {family: FOLDER / f"e2e_{family}" for family in ("qwen2_vl", "qwen3_vl")}
# Its requests are those of tests/runtime.
FOLDERS["qwen2_5_vl"] = FOLDER / "e2e"
CASES: dict[str, list[dict[str, Any]]] = {
    family: [{**case, "folder": folder} for case in json.loads((folder / "cases.json").read_text())]
    for family, folder in FOLDERS.items()
}
TRUTHS = {family: [case for case in every if case["truth"]] for family, every in CASES.items()}
# The processor that recorded it resized with another library: begin from its own patches.
FROM_PATCHES = {"image_resized"}
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def opened(family: str) -> Checkpoint:
    return Checkpoint.open(FOLDERS[family] / "checkpoint")


# Planted bugs of the runtime are judged by the first of the family that writes time as text and has levels.
SLOW = pytest.mark.slow
BACKENDS = ("onnxruntime", "openvino", "inductor")
TIMED = [
    "qwen3_vl eager",
    *(pytest.param(f"qwen3_vl {each}", marks=SLOW) for each in BACKENDS[:2]),
    pytest.param(f"qwen3_vl {BACKENDS[2]}", marks=[SLOW, pytest.mark.full]),
]
ENGINES = [
    *TIMED,
    pytest.param("qwen2_vl eager", marks=SLOW),
    *(pytest.param(f"qwen2_vl {each}", marks=[SLOW, pytest.mark.full]) for each in BACKENDS),
]


class Pipelines:
    """The pipelines of one engine: for each prompt layout of its family, the one of a case."""

    def __init__(self, name: str, into: Path) -> None:
        family, backend = name.split()
        self.cases, self.truths = CASES[family], TRUTHS[family]
        checkpoint = opened(family)
        bundle = build_checkpoint(
            build_request(checkpoint, backend=backend, output_dir=into)
        ).require_passed()
        self.outer = load(bundle.path, checkpoint=checkpoint)
        self.bare = self.outer
        if family == "qwen3_vl":
            options = RuntimeOptions(prompt_layout="bare")
            self.bare = Pipeline(
                self.outer.bundle, self.outer.engine, self.outer.recipe, self.outer.language, options
            )

    def __call__(self, case: dict[str, Any]) -> Pipeline:
        return self.bare if case["layout"] == "bare" else self.outer


@pytest.fixture(scope="module")
def engines(shared) -> Callable[[str], Pipelines]:
    return cache(lambda name: Pipelines(name, shared / "engines"))


@pytest.fixture(params=ENGINES)
def pipelines(request, engines: Callable[[str], Pipelines]) -> Pipelines:
    return engines(request.param)


@pytest.fixture(params=TIMED)
def timed(request, engines: Callable[[str], Pipelines]) -> Pipelines:
    return engines(request.param)


def source(case: dict[str, Any], tensors: dict[str, torch.Tensor], index: int) -> Pixels | MediaItem:
    about = case["media"][index]
    if case["name"] in FROM_PATCHES:
        return items_of(tensors["media0.pixel_values"], [tensors["media0.grid_thw"].tolist()])[0]
    raw = tensors.get(f"media{index}.raw")
    if raw is None:  # pixels of cases without truth were not kept
        random = torch.Generator().manual_seed(index)
        raw = torch.randint(0, 256, about["shape"], dtype=torch.uint8, generator=random)
    seconds = ()
    if case["layout"] and about["frames_indices"]:
        seconds = tuple(at / about["fps"] for at in about["frames_indices"])
    frames = raw if raw.ndim == 4 else raw[None]
    return Pixels(kind=about["kind"], frames=frames, frames_per_second=about["fps"], seconds=seconds)


def tensors_of(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(case["folder"] / case["file"]) if case["file"] else {}


def recorded(case: dict[str, Any]) -> tuple[Request, dict[str, torch.Tensor]]:
    """The request of a case as it was put, and what was recorded."""
    tensors = tensors_of(case)
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


@pytest.mark.seconds
def test_prompts_masks_positions_and_tokens_equal_the_recorded_ones(pipelines, subtests):
    for case in pipelines.truths:
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


@pytest.mark.seconds
def test_requests_among_others_get_the_tokens_they_get_alone(pipelines):
    chosen = [case for case in pipelines.truths if case["layout"] != "bare"]
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


@pytest.mark.seconds
def test_requests_that_break_the_other_runtime_follow_the_plain_rule(timed, subtests):
    for case in timed.cases:
        if case["truth"]:
            continue
        with subtests.test(case["name"]):
            pipeline = timed(case)
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


CHUNKED = {
    "qwen2_vl": [case["name"] for case in CASES["qwen2_vl"]],
    "qwen3_vl": ["image_then_video", "evs_outer_q50", "evs_image_then_video_q75"],
}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 16, 64))])
def test_tokens_do_not_depend_on_the_size_of_prefill_chunks(pipelines, chunk, subtests):
    for case in pipelines.truths:
        if case["name"] not in CHUNKED[pipelines.outer.recipe.name]:
            continue
        with subtests.test(case["name"]):
            request, _ = recorded(case)
            request = replace(request, generation=replace(request.generation, prefill_chunk=chunk))
            assert list(pipelines(case).generate(request).token_ids) == case["token_ids"]


@pytest.mark.seconds
def test_embeddings_that_were_made_before_answer_alike(timed):
    case = next(case for case in timed.truths if case["name"] == "evs_outer_q50")
    pipeline, (request, _) = timed(case), recorded(case)
    (video,) = pipeline.encode(videos=list(request.videos), prune=case["q"])
    assert video.layers["level_0"].shape == video.layers["level_1"].shape == video.embeds.shape
    again = replace(request, videos=[video])
    assert list(pipeline.generate(again).token_ids) == case["token_ids"]
    with pytest.raises(InputError, match="layers none given, level_0, level_1 expected"):
        pipeline.generate(replace(request, videos=[replace(video, layers={})]))
    short = {name: rows[1:] for name, rows in video.layers.items()}
    with pytest.raises(InputError, match="video level_0: 11 rows given, as many as embeddings expected"):
        pipeline.generate(replace(request, videos=[replace(video, layers=short)]))


def test_a_video_without_times_is_encoded_but_not_put_into_a_prompt(timed):
    case = next(case for case in timed.truths if case["name"] == "video_fps2")
    pipeline, (request, _) = timed(case), recorded(case)
    (given,) = request.videos
    assert isinstance(given, Pixels)
    untimed = replace(given, frames_per_second=None, seconds=())
    assert pipeline.encode(videos=[untimed], prune=0.5)[0].frame_seconds == ()
    with pytest.raises(InputError, match=r"times of 0 frames given, 4 expected.*as fps"):
        pipeline.generate(replace(request, videos=[untimed]))


def test_a_prompt_layout_that_the_family_does_not_have_is_refused(timed):
    pipeline = timed.outer
    options = RuntimeOptions(prompt_layout="inner")
    with pytest.raises(InputError, match=r"prompt layout 'inner' given. Known: bare\."):
        Pipeline(pipeline.bundle, pipeline.engine, pipeline.recipe, pipeline.language, options)


def test_texts_of_pruned_videos_are_the_recorded_layouts():
    """Frame by frame once the mask is known; with all kept tokens in the first frame before that."""
    checkpoint = opened("qwen3_vl")
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FOLDERS)
def test_the_tower_equals_that_of_the_other_runtime(family, layout):
    checkpoint = opened(family)
    recipe = recipe_for(checkpoint)
    config, tower = recipe.read_config(checkpoint), recipe.tower(checkpoint, "float32")
    for case in TRUTHS[family][: 12 if family == "qwen3_vl" else None]:
        tensors = tensors_of(case)
        for index, about in enumerate(case["media"]):
            patches = tensors[f"media{index}.{PIXELS[about['kind']]}"]
            (item,) = items_of(patches, [tensors[f"media{index}.grid_thw"].tolist()])
            with torch.inference_mode():
                outputs = tower(recipe.prepare(config, [replace(item, kind=about["kind"])], layout))
            joined = torch.cat(list(outputs.values()), dim=1)
            # transformers' own tower is off by 6e-6 from these.
            torch.testing.assert_close(joined, tensors[f"media{index}.tower_out"], rtol=0, atol=1e-4)


def test_pixels_equal_those_of_the_recorded_processor():
    checkpoint = opened("qwen3_vl")
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    for case in TRUTHS["qwen3_vl"]:
        tensors = tensors_of(case)
        for index, about in enumerate(case["media"]):
            pixels = source(case, tensors, index)
            if isinstance(pixels, MediaItem):
                continue
            item = recipe.preprocess(config, pixels)
            assert item.grid == tuple(tensors[f"media{index}.grid_thw"].tolist()), case["name"]
            patches = tensors[f"media{index}.{PIXELS[about['kind']]}"]
            torch.testing.assert_close(item.patches, patches, rtol=0, atol=1e-6)
            if about["kind"] == "video":
                assert list(item.frame_seconds) == tensors[f"media{index}.seconds"].tolist()
