"""MiniCPM-V of every release: recorded towers, random slices, and one ONNX engine for any of them."""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Idefics2VisionConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
from vlexport.recipes._minicpmv_reference import SliceReference
from vlexport.recipes.minicpmv import Tower

from tests.backends.towers import build_tower, errors
from tests.golden_data import Case, cases
from tests.slice_mixes import random_mix
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.backends import Engine, Options
from vlexport.checkpoint import Checkpoint
from vlexport.integrations.vllm.models import rows_of_strip
from vlexport.parity.samples import Sample, random_items
from vlexport.recipe import Recipe, Reference, find_recipe
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.specs import MediaItem
from vlexport.vision.slices import Slice, image_of_rows

RECIPE = find_recipe("minicpmv")
# Largest difference over all recorded runs: 6.0e-7.
RECORDED = 1e-5
# parity.md 5, float32; the largest seen over 1,000 mixes: 4.4e-6 and 1.7e-5.
RELATIVE_L2, WORST_TOKEN = 1e-5, 5e-5


def recorded_checkpoint(folder: Path, model: int, version: str) -> Checkpoint:
    """Write a recorded model as a checkpoint, its heads of 8 columns widened to the 128 of releases."""
    case = next(case for case in cases("minicpm_tower", "weights") if case.meta["model"] == model)
    meta = case.meta
    config = {
        "model_type": "minicpmv",
        "version": version,
        "vision_config": meta["vision_config"],
        "hidden_size": WIDER * meta["embed"],
        "query_num": meta["queries"],
        "drop_vision_last_layer": meta["drop"],
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(widened(case.inputs, meta["heads"]), folder / "model.safetensors")
    return Checkpoint.open(folder)


WIDER = 16


def widened(tensors: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """The same resampler with every column 16 times, and heads 16 times as wide of which a sixteenth is used.

    Means and variances of the norms stay, the wider table of places has the narrow one in every 16th column,
    and queries are four times as large because scores are divided by the root of a head's width.
    """
    made = {name: each for name, each in tensors.items() if not name.startswith("resampler.")}
    old = {name.removeprefix("resampler."): t for name, t in tensors.items() if name.startswith("resampler.")}
    width = old["query"].shape[1]
    many = torch.arange(width).repeat_interleave(WIDER)
    # Column of each old one: among the many, and inside its head.
    first = torch.arange(width) * WIDER
    head = width // heads
    inside = torch.arange(width) // head * head * WIDER + torch.arange(width) % head

    def spread(values: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(width * WIDER, width * WIDER)
        out[rows[:, None], columns] = values
        return out

    weights = old["attn.in_proj_weight"].chunk(3)
    biases = old["attn.in_proj_bias"].chunk(3)
    scale = (WIDER**0.5, 1.0, 1.0)
    new = {
        "query": old["query"][:, many],
        "kv_proj.weight": old["kv_proj.weight"][many],
        "proj": spread(old["proj"], first, first),
        "attn.in_proj_weight": torch.cat(
            [spread(each * by, inside, first) for each, by in zip(weights, scale, strict=True)]
        ),
        "attn.in_proj_bias": torch.cat(
            [
                torch.zeros(width * WIDER).index_copy(0, inside, each * by)
                for each, by in zip(biases, scale, strict=True)
            ]
        ),
        "attn.out_proj.weight": spread(old["attn.out_proj.weight"], first, inside)[first][many],
        "attn.out_proj.bias": old["attn.out_proj.bias"][many],
        **{name: each[many] for name, each in old.items() if name.startswith("ln_")},
    }
    return made | {f"resampler.{name}": each.contiguous() for name, each in new.items()}


def recorded_items(case: Case) -> list[MediaItem]:
    sizes = torch.tensor(case.meta["tgt_sizes"])
    strips = [case.inputs[f"slice{index}"] for index in range(len(sizes))]
    times = [tuple(map(tuple, groups)) for groups in case.meta["temporal_ids"] or ()]
    patches = torch.cat([rows_of_strip(strip) for strip in strips])
    slices = tuple((high, wide) for high, wide in sizes.tolist())
    grid = (len(slices), *slices[-1])
    groups = times[0] if times else ()
    return [MediaItem(kind="image", patches=patches, grid=grid, slices=slices, frame_groups=groups)]


@pytest.mark.seconds
def test_tokens_equal_the_recorded_ones(tmp_path: Path) -> None:
    for number, case in enumerate(cases("minicpm_tower", "run")):
        folder = tmp_path / f"recorded-{number}"
        checkpoint = recorded_checkpoint(folder, case.meta["model"], case.meta["version"])
        config, items = RECIPE.read_config(checkpoint), recorded_items(case)
        wanted = case.outputs["out"]
        assert sum(RECIPE.num_tokens(config, item) for item in items) == wanted.shape[0] * wanted.shape[1]
        with torch.inference_mode():
            found = RECIPE.tower(checkpoint, "float32")(RECIPE.prepare(config, items, "grouped"))["embeds"]
        theirs = RECIPE.reference(checkpoint).run(items)["embeds"]
        for embeds in (found, theirs):
            torch.testing.assert_close(embeds[:, ::WIDER], wanted.flatten(0, 1), rtol=0, atol=RECORDED)


@dataclass
class Line:
    """One release: its tower in torch, the reference with the same weights, an ONNX engine."""

    recipe: Recipe[Any]
    checkpoint: Checkpoint
    config: Any
    tower: torch.nn.Module
    reference: Reference
    engine: Engine

    def tokens(self, items: list[MediaItem]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self.tower(self.recipe.prepare(self.config, items, "grouped"))["embeds"]
        return found

    def engine_tokens(self, items: list[MediaItem]) -> torch.Tensor:
        return self.engine.run(self.recipe.prepare(self.config, items, "grouped"))["embeds"]

    @property
    def timed(self) -> bool:
        return bool(self.config.variant.frame_times)


# The oldest and the newest have what the others have, and tests/reference judges the towers of all of them.
QUICK = ("2.0", "4.5")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in VERSIONS],
)
def line(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp(f"release-{request.param}")
    tiny = Tiny(version=request.param, drop_last=True, with_decoder=False)
    source = write_tiny_minicpmv(folder / "checkpoint", tiny, others=True)
    built = build_tower(source, "onnxruntime", folder / "engine")
    recipe, checkpoint = built.recipe, built.checkpoint
    with built.engine as engine:
        yield Line(
            recipe=recipe,
            checkpoint=checkpoint,
            config=recipe.read_config(checkpoint),
            tower=recipe.tower(checkpoint, "float32"),
            reference=recipe.reference(checkpoint),
            engine=engine,
        )


def assert_equal_tokens(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    relative, worst = errors(found, wanted)
    assert relative < RELATIVE_L2
    assert worst < WORST_TOKEN


@pytest.mark.seconds
def test_one_onnx_engine_serves_any_mix(line: Line) -> None:
    source = random.Random(1)
    for _ in range(25):
        items = random_mix(source, line.config.cut, timed=line.timed)
        assert_equal_tokens(line.engine_tokens(items), line.reference.run(items)["embeds"])


@pytest.mark.seconds
def test_blocks_compare_in_the_order_of_the_items(line: Line) -> None:
    items = random_mix(random.Random(5), line.config.cut, timed=line.timed)
    tower = line.recipe.tower(line.checkpoint, "float32")
    assert isinstance(tower, Tower)
    with torch.inference_mode():
        first, layout = tower.begin(line.recipe.prepare(line.config, items, "grouped"))
        outputs, taken = line.reference.blocks(items)
        assert torch.equal(outputs["embeds"], line.reference.run(items)["embeds"])
        assert errors(layout.restore(first), taken[0][0])[0] < RELATIVE_L2
        for block, (given, wanted) in zip(tower.blocks, taken, strict=True):
            found = layout.restore(block(layout.arrange(given), layout))
            assert errors(found, wanted)[0] < RELATIVE_L2


def test_what_is_computed_for_padding_is_counted(line: Line) -> None:
    """Nothing in runs. Equal slices fill a shelf; two others are empty, a row of one patch each."""
    mix = random_mix(random.Random(6), line.config.cut, timed=line.timed)
    equal = list(random_items(line.recipe, line.config, [("image", (4, 3, 5))], seed=0))
    packing = line.recipe.packing(line.config)
    assert all(computed == needed for computed, needed in packing.attention_work(mix, "grouped").values())
    found = packing.attention_work(equal, "padded")
    queries = line.config.tower.queries
    assert found["slice"] == (4 * 15**2 + 2, 4 * 15**2)
    assert found["group"][0] == found["group"][1] + 2 * queries


def checkpoint_of(folder: Path, version: str) -> Checkpoint:
    return Checkpoint.open(
        write_tiny_minicpmv(folder / "checkpoint", Tiny(version=version, with_decoder=False))
    )


def pipeline_of(folder: Path, version: str, backend: str = "onnxruntime", profile: str = "any") -> Pipeline:
    spec = request(
        checkpoint_of(folder, version), backend=backend, profile=profile, output_dir=folder / "engines"
    )
    bundle = build_checkpoint(spec).require_passed()
    return load(bundle.path, options=Options(threads=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "backend"), [("2.0", "onnxruntime"), ("2.5", "eager"), ("4.5", "onnxruntime")]
)
def test_a_bundle_passes_its_gate_and_takes_any_mix_and_media(version, backend, tmp_path):
    reference = RECIPE.reference(checkpoint_of(tmp_path / "again", version))
    source = np.random.Generator(np.random.PCG64(0))
    image = source.integers(0, 256, (1, 200, 320, 3), dtype=np.uint8)
    video = source.integers(0, 256, (4, 60, 90, 3), dtype=np.uint8)
    with pipeline_of(tmp_path, version, backend) as pipeline:
        timed = pipeline.config.variant.frame_times
        items = random_mix(random.Random(4), pipeline.config.cut, timed=timed)
        found = torch.cat([each.embeds for each in pipeline.encode_items(items)])
        assert errors(found, reference.run(items)["embeds"])[0] < RELATIVE_L2
        # 200 x 320 pixels in slices of 112 x 112: six cells in two rows, and an overview.
        films = [video] if version == "4.5" else []
        still, *clips = pipeline.encode(images=[image[0]], videos=films, fps=2.0)
        assert still.embeds.shape == (7 * 4, 256)
        assert [(clip.embeds.shape, clip.grid[0]) for clip in clips] == [((4 * 4, 256), 4)] * len(films)


def test_the_gate_runs_with_frame_numbers_where_keys_carry_them(tmp_path: Path) -> None:
    config = RECIPE.read_config(checkpoint_of(tmp_path, "4.5"))
    (video,) = random_items(RECIPE, config, RECIPE.shape_sets(config)["video"], seed=0)
    assert video.frame_groups == ((0, 5, 10),)
    other = replace(video, frame_groups=((0, 5), (10,)))
    assert Sample(name="", items=(video,)).digest() != Sample(name="", items=(other,)).digest()


# SigLIP so400m at 980 pixels; 27 layers.
TOWER = Tiny(
    depth=27, hidden=1152, heads=16, inner=4304, side=70, queries=64, slice_side=448, with_decoder=False
)
PUBLISHED = {"2.6": replace(TOWER, version="2.6", out=3584), "4.5": replace(TOWER, version="4.5", out=4096)}


def image_of_slices(config: Any, seed: int) -> MediaItem:
    """An overview and two cells, as an image of 448 x 896 pixels is cut."""
    sizes = ((23, 46), (32, 32), (32, 32))
    rows = sum(down * across for down, across in sizes)
    patches = torch.randn(rows, config.cut.row_width, generator=torch.Generator().manual_seed(seed))
    return MediaItem(kind="image", patches=patches, grid=(1, 32, 64), slices=sizes)


@pytest.mark.full
@pytest.mark.parametrize("version", PUBLISHED)
def test_a_full_size_bundle_passes_its_gate_and_agrees_on_a_cut_image(version, tmp_path, record_property):
    checkpoint = Checkpoint.open(write_tiny_minicpmv(tmp_path / "checkpoint", PUBLISHED[version]))
    started = time.monotonic()
    spec = request(checkpoint, output_dir=tmp_path / "engines")
    bundle = build_checkpoint(spec).require_passed()
    built = time.monotonic()
    config = spec.recipe.read_config(checkpoint)
    item = image_of_slices(config, 0)
    with load(bundle.path, options=Options(threads=os.cpu_count() or 1)) as pipeline:
        opened = time.monotonic()
        found = pipeline.encode_items([item])[0].embeds
        encoded = time.monotonic()
    relative, worst = errors(found, spec.recipe.reference(checkpoint).run([item])["embeds"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    numbers = {
        "build_s": built - started,
        "encode_s": encoded - opened,
        "peak_gib": peak,
        "relative_l2": relative,
        "worst_token": worst,
    }
    for name, value in numbers.items():
        record_property(name, value)
    print(json.dumps({name: float(f"{value:.3g}") for name, value in numbers.items()}))
    assert found.shape == (3 * 64, config.tower.out_width)
    # Measured 2.7e-6 and 3.3e-6 on 3,106 patches of 2.6.
    assert relative < RELATIVE_L2
    assert worst < WORST_TOKEN


@pytest.mark.parametrize("version", ["2.6", "2.0"])
def test_the_reference_sees_what_the_whole_class_sees(version, tmp_path):
    """transformers' class, its own places included, on one slice as a plain image."""
    reference = RECIPE.reference(checkpoint_of(tmp_path, version))
    assert isinstance(reference, SliceReference)
    sizes: Any = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_size": 140, "patch_size": 14,
    }  # fmt: skip
    other: nn.Module = Idefics2VisionTransformer(Idefics2VisionConfig(**sizes))
    if version == "2.0":
        other = SiglipVisionModel(SiglipVisionConfig(**sizes, hidden_act="gelu", vision_use_head=False))
    other.eval().load_state_dict(reference.encoder.state_dict())
    shapes = [(1, 1), (10, 10), (3, 7), (9, 4), (2, 16), (13, 12)] if version == "2.6" else [(10, 10)]
    for rows, columns in shapes:
        patches = torch.randn(rows * columns, 588, generator=torch.Generator().manual_seed(rows))
        with torch.inference_mode():
            seen = reference.see(patches, Slice(start=0, rows=rows, columns=columns, frame=-1))
            whole = other(image_of_rows(patches, rows, columns, 14)[None]).last_hidden_state[0]
        # The same layers over the same rows: 5e-7 seen.
        torch.testing.assert_close(seen, whole, rtol=0, atol=5e-6)


def test_the_reference_agrees_with_a_file_of_weights_alone(tmp_path):
    """No module of ours in between: torch's attention filled straight from the stored names."""
    checkpoint = checkpoint_of(tmp_path, "2.6")
    stored = checkpoint.read(
        [name for name in checkpoint.tensor_names() if name.startswith("resampler.attn.")]
    )
    attention = nn.MultiheadAttention(256, 2)
    attention.load_state_dict({name.removeprefix("resampler.attn."): value for name, value in stored.items()})
    reference = RECIPE.reference(checkpoint)
    assert isinstance(reference, SliceReference)
    for name, value in reference.resampler.attn.state_dict().items():
        assert torch.equal(value, attention.state_dict()[name])
