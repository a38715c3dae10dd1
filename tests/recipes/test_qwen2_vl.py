"""Qwen2-VL, a family without windows: requests of another runtime token for token, towers in all layouts."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vlexport.recipes.demo.qwen2_vl import Tiny, contents
from vlexport.recipes.demo.writing import write_checkpoint

from tests.backends.towers import NATIVE
from tests.cli.lines import vlexport
from tests.golden_data import FOLDER
from tests.tiny_qwen2_5_vl import flat
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.parity.samples import random_items
from vlexport.recipe import recipe_for
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.attention.layout import LAYOUTS

build = importlib.import_module("vlexport._build.build")
E2E = FOLDER / "e2e_qwen2_vl"
CASES: list[dict[str, Any]] = json.loads((E2E / "cases.json").read_text())
# The processor that recorded it resized with another library: begin from its own patches.
FROM_PATCHES = {"image_resized"}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(E2E / "checkpoint")


BACKENDS = ("onnxruntime", "eager", "openvino", "inductor")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pipeline(backend: str, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    spec = build.request(checkpoint, backend=backend, into=tmp_path_factory.mktemp("engines"))
    bundle = build.build_checkpoint(spec).require_passed()
    return load(bundle.path, decoder=checkpoint)


def media_of(case: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, list[Pixels | MediaItem]]:
    found: dict[str, list[Pixels | MediaItem]] = {"image": [], "video": []}
    for index, about in enumerate(case["media"]):
        raw = tensors[f"media{index}.raw"]
        frames = raw if raw.ndim == 4 else raw[None]
        item: Pixels | MediaItem = Pixels(kind=about["kind"], frames=frames, frames_per_second=about["fps"])
        if case["name"] in FROM_PATCHES:
            patches, grid = tensors[f"media{index}.pixel_values"], tensors[f"media{index}.grid_thw"].tolist()
            item = MediaItem(kind=about["kind"], patches=patches, grid=tuple(grid))
        found[about["kind"]].append(item)
    return found


def request_of(case: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Request:
    media = media_of(case, tensors)
    return Request(
        raw_prompt=case["prompt"],
        images=media["image"],
        videos=media["video"],
        generation=Generation(max_new_tokens=32, prefill_chunk=case["chunk_budget"]),
    )


def test_positions_and_tokens_equal_the_recorded_ones(pipeline: Pipeline) -> None:
    for case in CASES:
        tensors = load_file(E2E / case["file"])
        answer = pipeline.generate(request_of(case, tensors))
        assert list(answer.prompt_token_ids) == case["prompt_token_ids"], case["name"]
        assert torch.equal(answer.positions, tensors["positions"]), case["name"]
        assert answer.delta == case["delta"], case["name"]
        assert list(answer.token_ids) == case["token_ids"], case["name"]


def test_requests_among_others_get_the_tokens_they_get_alone(pipeline: Pipeline) -> None:
    pipeline.encoder.cache.clear()
    answers = pipeline.generate_all([request_of(case, load_file(E2E / case["file"])) for case in CASES])
    found = [list(answer.token_ids) for answer in answers]  # type: ignore[union-attr]
    assert found == [case["token_ids"] for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 16, 64))])
def test_tokens_do_not_depend_on_the_size_of_prefill_chunks(pipeline: Pipeline, chunk: int) -> None:
    for case in CASES:
        request = request_of(case, load_file(E2E / case["file"]))
        request = replace(request, generation=replace(request.generation, prefill_chunk=chunk))
        assert list(pipeline.generate(request).token_ids) == case["token_ids"], case["name"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tower_equals_the_recorded_outputs_in_every_layout(checkpoint: Checkpoint, layout: str) -> None:
    recipe = recipe_for(checkpoint)
    config, tower = recipe.read_config(checkpoint), recipe.tower(checkpoint, "float32")
    for case in CASES:
        tensors = load_file(E2E / case["file"])
        for index, about in enumerate(case["media"]):
            name = "pixel_values" if about["kind"] == "image" else "pixel_values_videos"
            grid = tuple(tensors[f"media{index}.grid_thw"].tolist())
            item = MediaItem(kind=about["kind"], patches=tensors[f"media{index}.{name}"], grid=grid)
            with torch.inference_mode():
                found = tower(recipe.prepare(config, [item], layout))["embeds"]
            # transformers' own tower is off by 6e-6 from these.
            torch.testing.assert_close(found, tensors[f"media{index}.tower_out"], rtol=0, atol=1e-4)


def test_items_give_the_same_tokens_together_as_apart(checkpoint: Checkpoint) -> None:
    recipe = recipe_for(checkpoint)
    config, tower = recipe.read_config(checkpoint), recipe.tower(checkpoint, "float32")
    items = random_items(recipe, config, recipe.shape_sets(config)["films"], seed=0)
    for layout in LAYOUTS:
        with torch.inference_mode():
            together = tower(recipe.prepare(config, items, layout))["embeds"]
            apart = [tower(recipe.prepare(config, [item], layout))["embeds"] for item in items]
        # Sums over other batch sizes.
        torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=2e-5)


def test_a_config_survives_its_json(checkpoint: Checkpoint) -> None:
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    assert recipe.parse_config(json.loads(json.dumps(encode(config)))) == config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words", "status"),
    [
        ("eager", ("--dtype", "bfloat16"), "passed"),
        ("onnxruntime", ("--quantize", "int8"), "passed"),
        ("openvino", ("--quantize", "int8"), "passed"),
        pytest.param("openvino", ("--dtype", "bfloat16"), "passed", marks=NATIVE),
        ("inductor", ("--dtype", "bfloat16"), "passed"),
        ("tensorrt_rtx", ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "float32"), "not_run"),
        ("tensorrt_rtx", ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "bfloat16"), "not_run"),
        ("tensorrt_rtx", ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "float16"), "not_run"),
    ],
)
@pytest.mark.parametrize("style", ["flat", pytest.param("nested", marks=pytest.mark.full)])
def test_the_demo_checkpoint_builds_in_every_precision(tmp_path, backend, words, status, style) -> None:
    if missing := find_backend(backend).missing():
        pytest.skip(missing)
    naming = "visual." if style == "flat" else "model.visual."
    made = contents(Tiny(depth=1, naming=naming, with_decoder=False))
    checkpoint = write_checkpoint(tmp_path / "tiny", flat(made) if style == "flat" else made, seed=0)
    ran = vlexport("build", checkpoint, "--backend", backend, *words, "--output-dir", tmp_path / "engines")
    assert ran.code == 0, ran.err
    assert f", {status}\n" in ran.err
