"""Kimi-VL: towers of another runtime in all layouts, and the reference that stands for its class."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vlexport.recipes import kimi_vl
from vlexport.recipes.demo.kimi_vl import Tiny, contents, processor_json, token
from vlexport.recipes.demo.writing import write_checkpoint

from tests.backends.towers import NATIVE
from tests.cli.lines import vlexport
from tests.golden_data import counted
from tests.recipes.deepseek import text_model_of
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.errors import CheckpointError, InputError, LimitError
from vlexport.parity.samples import random_items
from vlexport.recipe import find_recipe
from vlexport.runtime.pipeline import load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.attention.layout import LAYOUTS

build = importlib.import_module("vlexport._build.build")
RECIPE = find_recipe("kimi_vl")
# The recorded float32 tower and ours differ by 7.2e-7 on these, the reference by 8.4e-7.
NEAR = 1e-5


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = contents(Tiny(depth=2, with_decoder=False))
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("kimi") / "tiny", made, seed=0))


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


def test_every_mix_equals_the_reference_in_every_layout(tiny: Checkpoint) -> None:
    config, tower, reference = RECIPE.read_config(tiny), RECIPE.tower(tiny, "float32"), RECIPE.reference(tiny)
    for name, mix in RECIPE.shape_sets(config).items():
        items = random_items(RECIPE, config, mix, seed=0)
        wanted = reference.run(items)["embeds"]
        for layout in LAYOUTS:
            with torch.inference_mode():
                found = tower(RECIPE.prepare(config, items, layout))["embeds"]
            assert float((found - wanted).norm() / wanted.norm()) < RECIPE.limits["float32"].relative_l2, name


def test_items_give_the_same_tokens_together_as_apart(tiny: Checkpoint) -> None:
    config, tower = RECIPE.read_config(tiny), RECIPE.tower(tiny, "float32")
    items = random_items(RECIPE, config, RECIPE.shape_sets(config)["album"], seed=0)
    for layout in LAYOUTS:
        with torch.inference_mode():
            together = tower(RECIPE.prepare(config, items, layout))["embeds"]
            apart = [tower(RECIPE.prepare(config, [item], layout))["embeds"] for item in items]
        # Sums over other batch sizes.
        torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=2e-5)


def test_a_config_survives_its_json(tiny: Checkpoint) -> None:
    config = RECIPE.read_config(tiny)
    assert RECIPE.parse_config(json.loads(json.dumps(encode(config)))) == config


def test_what_no_release_has_is_refused(tiny: Checkpoint, tmp_path: Path) -> None:
    def changed(name: str, file: str, **values: object) -> Checkpoint:
        folder = tmp_path / name
        folder.mkdir()
        for path in tiny.path.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        stored = json.loads((folder / file).read_text())
        section = stored["vision_config"] if file == "config.json" else stored
        section.update(values)
        (folder / file).write_text(json.dumps(stored))
        return Checkpoint.open(folder)

    for name, file, values in (
        ("merge_kernel_size", "config.json", {"merge_kernel_size": [2, 4]}),
        ("pad_input", "preprocessor_config.json", {"pad_input": False}),
        ("patch_size", "preprocessor_config.json", {"patch_size": 16}),
    ):
        with pytest.raises(CheckpointError, match=f"{name}' is"):
            RECIPE.read_config(changed(name, file, **values))
    config = RECIPE.read_config(tiny)
    clip = MediaItem(kind="video", patches=torch.zeros(8, 588), grid=(2, 2, 2))
    with pytest.raises(InputError, match=r"item 0: a video given\. This family takes images only"):
        RECIPE.prepare(config, [clip], "grouped")
    with pytest.raises(InputError, match="takes images only"):
        RECIPE.preprocess(config, Pixels(kind="video", frames=torch.zeros(2, 28, 28, 3, dtype=torch.uint8)))
    with pytest.raises(LimitError, match="fewer than 512 patches"):
        RECIPE.preprocess(
            config, Pixels(kind="image", frames=torch.zeros(1, 13, 512 * 14, 3, dtype=torch.uint8))
        )


BACKENDS = [
    ("onnxruntime", "float32"),
    ("eager", "float32"),
    ("openvino", "float32"),
    ("inductor", "float32"),
]
BACKENDS += [("inductor", "bfloat16"), ("eager", "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"), [*BACKENDS, pytest.param("openvino", "bfloat16", marks=NATIVE)]
)
def test_bundles_encode_what_they_were_not_traced_with_and_answer_like_the_class(
    tmp_path: Path, backend: str, dtype: str
) -> None:
    if missing := find_backend(backend).missing():
        pytest.skip(missing)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny", contents(Tiny(depth=1)), seed=0))
    spec = build.request(checkpoint, backend=backend, dtype=dtype, into=tmp_path / "engines")
    bundle = build.build_checkpoint(spec).require_passed()
    sides = [(61, 120), (300, 45), (28, 28)]
    source = torch.Generator().manual_seed(0)
    images = [
        Pixels(kind="image", frames=torch.randint(256, (1, *side, 3), dtype=torch.uint8, generator=source))
        for side in sides
    ]
    pipeline = load(bundle.path, decoder=checkpoint)
    config = RECIPE.read_config(checkpoint)
    wanted = RECIPE.reference(checkpoint).run([RECIPE.preprocess(config, image) for image in images])
    found = torch.cat([item.embeds.float() for item in pipeline.encode(images=images)])
    error = float((found - wanted["embeds"]).norm() / wanted["embeds"].norm())
    assert error < RECIPE.limits[dtype].relative_l2
    if dtype != "float32":
        return
    generation = Generation(max_new_tokens=16, prefill_chunk=37)
    answer = pipeline.generate(Request(prompt="Which?", images=images, generation=generation))
    model = text_model_of(checkpoint, tmp_path / "class")
    ids = torch.tensor([answer.prompt_token_ids])
    embeds = model.get_input_embeddings()(ids)
    slot = token("<|media_pad|>")
    assert int((ids == slot).sum()) == len(wanted["embeds"])
    embeds[ids == slot] = wanted["embeds"]
    theirs = model.generate(inputs_embeds=embeds, max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert list(answer.token_ids) == theirs[0].tolist()[: len(answer.token_ids)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words", "status"),
    [
        ("onnxruntime", ("--quantize", "int8"), "passed"),
        ("onnxruntime", ("--input", "uint8"), "passed"),
        ("tensorrt_rtx", ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "float32"), "not_run"),
        ("tensorrt_rtx", ("--targets", "sm89", "--profile", "thumbnail", "--dtype", "bfloat16"), "not_run"),
    ],
)
def test_the_demo_checkpoint_builds_in_other_ways(tmp_path, backend, words, status) -> None:
    if missing := find_backend(backend).missing():
        pytest.skip(missing)
    checkpoint = write_checkpoint(tmp_path / "tiny", contents(Tiny(depth=1, with_decoder=False)), seed=0)
    ran = vlexport("build", checkpoint, "--backend", backend, *words, "--output-dir", tmp_path / "engines")
    assert ran.code == 0, ran.err
    assert f", {status}\n" in ran.err
