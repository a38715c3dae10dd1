"""MiniCPM-V of every release: recorded towers, random slices, and one ONNX engine for any of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vlexport.recipes.minicpmv import Tower

from tests.backends.towers import build_tower, errors
from tests.golden_data import Case, cases
from tests.slice_mixes import random_mix
from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from vlexport.backends import Engine
from vlexport.checkpoint import Checkpoint
from vlexport.integrations.vllm.models import rows_of_strip
from vlexport.parity.samples import random_items
from vlexport.recipe import Recipe, Reference, find_recipe
from vlexport.specs import MediaItem

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


@pytest.mark.slow
def test_200_random_mixes_equal_one_slice_at_a_time(line: Line) -> None:
    source = random.Random(0)
    for _ in range(200):
        items = random_mix(source, line.config.cut, timed=line.timed)
        assert_equal_tokens(line.tokens(items), line.reference.run(items)["embeds"])


def test_one_onnx_engine_serves_any_mix(line: Line) -> None:
    source = random.Random(1)
    for _ in range(25):
        items = random_mix(source, line.config.cut, timed=line.timed)
        assert_equal_tokens(line.engine_tokens(items), line.reference.run(items)["embeds"])


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
