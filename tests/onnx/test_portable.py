"""The graphs around an engine equal the host's own code on random calls and recorded ones."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from functools import cache
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vlexport.recipes.demo import kimi_vl, nemotron_vl, qwen2_vl, qwen3_vl
from vlexport.recipes.demo.writing import write_checkpoint

from tests.mutation.trials import TRIALS
from tests.positions.blocks import recompute_positions
from tests.reference.test_positions import Prompt
from tests.slice_mixes import random_mix
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.export import example_inputs, specs_of
from vlexport._build.graph import Graph
from vlexport.backends import Folder, Portable
from vlexport.backends.onnxruntime import BACKEND
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.onnx import portable
from vlexport.positions.media import full_positions, pruned_channels
from vlexport.positions.mrope import frame_positions, initial_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionOptions, PositionRule
from vlexport.pruning.evs import prune
from vlexport.pruning.methods import METHODS
from vlexport.pruning.selectors import eager
from vlexport.recipe import recipe_for
from vlexport.specs import MediaItem
from vlexport.vision.grid_tower import GridPacking

DEMOS = {"qwen2_vl": qwen2_vl, "qwen3_vl": qwen3_vl, "kimi_vl": kimi_vl, "nemotron_vl": nemotron_vl}
QUICK = ("qwen2_5_vl", "minicpmv 4.5")
FAMILIES = (
    *DEMOS,
    "qwen2_5_vl",
    "nemotron_vl tiles",
    *(f"minicpmv {each}" for each in ("2.0", "2.5", "2.6", "4.0", "4.5")),
)
NUM_QUICK, NUM_SLOW, NUM_ALL = 20, 1000, 5000
CALLS = [(name, NUM_QUICK) for name in QUICK] + [
    pytest.param(name, count, marks=marks)
    for count, marks in ((NUM_SLOW, [pytest.mark.slow]), (NUM_ALL, [pytest.mark.slow, pytest.mark.full]))
    for name in FAMILIES
]


def write_family(folder: Path, name: str) -> Path:
    if name == "qwen2_5_vl":
        return write_tiny_qwen2_5_vl(folder)
    if name.startswith("minicpmv"):
        return write_tiny_minicpmv(folder, Tiny(version=name.split()[1]))
    tiles = nemotron_vl.contents(TRIALS["nemotron_vl"]["tiles"])
    write_checkpoint(folder, tiles if name == "nemotron_vl tiles" else DEMOS[name].contents())
    return folder


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """Trace each selection once for all merge sizes and paces; no library warns of anything meanwhile."""
    handler = BufferingHandler(1000)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "selection_model", cache(portable.selection_model))
        yield
    logging.getLogger().removeHandler(handler)
    assert [each.getMessage() for each in handler.buffer] == []


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """The portable graphs of a family, with its packing."""

    @cache
    def opened(name: str) -> tuple[Portable, Any, Any]:
        folder = tmp_path_factory.mktemp("family")
        checkpoint = Checkpoint.open(write_family(folder / "checkpoint", name))
        recipe = recipe_for(checkpoint)
        config = recipe.read_config(checkpoint)
        inputs = example_inputs(recipe, config, "float32", "grouped")
        graph = Graph(
            recipe=recipe,
            checkpoint=checkpoint,
            config=config,
            form="grouped",
            profile=next(iter(recipe.profiles(config).values())),
            inputs=specs_of(inputs, recipe.axes(config, "grouped")),
            outputs=(),
            module=None,  # type: ignore[arg-type]  # only names and axes are read
            program=None,  # type: ignore[arg-type]
        )
        BACKEND.write_portable(graph, recipe.pruning_rule, folder)
        return BACKEND.portable(Folder(folder), recipe.pruning_rule), recipe, config

    return opened


def random_items(source: random.Random, recipe: Any, config: Any) -> list[MediaItem]:
    if recipe.name == "minicpmv":
        return random_mix(source, config.cut, timed=config.tower.frame_times)
    merge, items = recipe.merge(config), []
    for _ in range(source.randint(1, 5)):
        most = (1,) if recipe.name == "kimi_vl" else (1, 1, 2, 3)
        frames, rows, columns = source.choice(most), *source.choices(range(1, 13), k=2)
        grid = (frames, rows * merge, columns * merge)
        patches = torch.zeros(1).expand(frames * rows * columns * merge**2, recipe.row_width(config))
        items.append(MediaItem(kind="image" if frames == 1 else "video", patches=patches, grid=grid))
    return items


@pytest.mark.seconds
@pytest.mark.parametrize(("name", "count"), CALLS)
def test_tables_equal_those_of_the_host_on_random_calls(family, name, count):
    found, recipe, config = family(name)
    source, packing = random.Random(count), recipe.packing(config)
    for _ in range(count):
        items = random_items(source, recipe, config)
        wanted = recipe.prepare(config, items, "grouped")
        given = found.tables(packing.structure(items))
        integers = {key for key, each in wanted.items() if not each.is_floating_point()}
        assert given.keys() == integers
        differing = [key for key in given if not torch.equal(given[key], wanted[key])]
        assert differing == [], [item.grid for item in items]
        assert {each.dtype for each in given.values()} == {torch.int32}


def test_groups_of_equal_length_are_sorted_by_their_slices(family):
    found, recipe, config = family("minicpmv 4.5")
    slices = [(2, 6), (1, 12), (4, 3), (3, 4), (6, 2), (1, 1), (2, 2), (1, 3), (1, 8), (2, 8), (8, 1)]
    structure = {
        "slices": torch.tensor(slices),
        "group_sizes": torch.tensor([1, 1, 2, 3, 2, 2]),
        "frame_numbers": torch.arange(11) - 1,
    }
    given, wanted = found.tables(structure), recipe.packing(config).tables(structure, "grouped")
    assert [key for key in wanted if not torch.equal(given[key], wanted[key])] == []
    # 12 | 12 | 12, 12 | 12, 1, 4 | 3, 8 | 16, 8: the shortest first, then those of smaller first slices.
    runs = [(1, 11), (2, 12), (1, 17), (2, 24)]
    assert given["group_runs"].tolist() == [[count, config.tower.queries, cells] for count, cells in runs]
    assert given["group_inverse"].tolist() == [1, 2, 4, 3, 0, 5]


def test_tables_that_read_numbers_on_the_host_are_refused_with_what_to_write(tmp_path):
    checkpoint = Checkpoint.open(write_family(tmp_path / "checkpoint", "qwen2_vl"))
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)

    class Listed(GridPacking):
        def segments(self, structure):
            assert all(frames > 0 for frames, _, _ in structure["grids"].tolist())
            return super().segments(structure)

    packing = Listed(config.rule)
    inputs = specs_of(example_inputs(recipe, config, "float32", "grouped"), packing.axes("grouped"))
    with pytest.raises(UnsupportedError, match=r"the tables of Listed cannot be traced .* as tensor code"):
        portable.tables_graph(packing, inputs)


@pytest.mark.seconds
def test_files_of_the_cache_are_used_while_they_are_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make():
        made.append(1)
        return portable.linear_positions()

    first = portable._kept("positions.onnx", ["any"], make)
    assert portable._kept("positions.onnx", ["any"], make) == first
    assert len(made) == 1
    (path,) = tmp_path.rglob("*.cache")
    path.write_bytes(path.read_bytes()[:-1])
    assert portable._kept("positions.onnx", ["any"], make) == first
    assert portable._kept("positions.onnx", ["another"], make) == first
    assert len(made) == 3


@cache
def prune_call(method: str, merge: int, pace: float, *, counts_frames: bool = False) -> Any:
    import onnxruntime

    graph = portable.prune_graph(METHODS[method], merge, pace, counts_frames)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph.SerializeToString(), settings)


def pruned(
    embeds: Tensor, grid: Sequence[int], rate: float, *, method="evs", merge=2, pace=1.0, seconds=1.0, **more
) -> list[Tensor]:
    """Return rows, indices and block of what is kept."""
    given = {"embeds": embeds.numpy(), "grid": np.array(grid), "rate": np.array(rate, np.float64)}
    given["seconds_per_grid"] = np.array(seconds, np.float32)
    return [
        torch.from_numpy(each) for each in prune_call(method, merge, float(pace), **more).run(None, given)
    ]


@pytest.mark.seconds
@pytest.mark.parametrize("method", sorted(METHODS))
def test_any_video_is_pruned_and_placed_as_by_the_runtime(method):
    source, generator = random.Random(0), torch.Generator().manual_seed(0)
    sizes = [(1, 1, 1), (2, 1, 1), (1, 1, 3), (4, 1, 2)]
    sizes += [(source.choice((1, 2, 3, 5)), source.randint(1, 6), source.randint(1, 6)) for _ in range(60)]
    for frames, rows, columns in sizes:
        merge, pace = source.choice(((1, 1.0), (2, 2.0), (2, 25 / 12)))
        seconds, rate = source.choice((0.5, 2 / 3, 1.0, 1.37, 4.0)), source.choice((0.0, 0.3, 0.9, 0.77))
        grid, tokens = (frames, merge * rows, merge * columns), frames * rows * columns
        embeds = torch.randn(tokens, 24, generator=generator)
        rule = PositionRule(kind="time_scaled", merge=merge, tokens_per_second=pace)
        item = PlacedMedia(modality="video", offset=0, length=tokens, grid=grid, seconds_per_grid=seconds)
        wanted = prune(embeds, grid, merge, rate, eager(METHODS[method]))
        settings = {"method": method, "merge": merge, "pace": pace, "seconds": seconds}
        found, kept, block = pruned(embeds, grid, rate, **settings)
        assert torch.equal(kept, wanted.kept), (grid, rate)
        assert torch.equal(found, wanted.embeds)
        places = pruned_channels(item, rule, kept) if rate else full_positions(item, rule).T
        assert torch.equal(block, places), (grid, seconds)


def test_the_time_between_frames_is_1_where_frames_are_counted():
    embeds = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    for rate in (0.0, 0.5):
        _, kept, block = pruned(embeds, (3, 4, 4), rate, pace=2.0, seconds=7.5, counts_frames=True)
        assert torch.equal(block[0], 2 * (kept // 4))


@pytest.mark.seconds
def test_frames_are_items_where_time_is_written_out(family):
    """As docs/portable.md describes; a frame of which nothing is left is the marker behind it."""
    found, _, _ = family("qwen3_vl")
    source, generator = random.Random(0), torch.Generator().manual_seed(0)
    rule = PositionRule(
        kind="time_as_text", markers=FrameMarkers(vision_start=1, vision_end=2, video=3), merge=2
    )
    empty = 0
    for _ in range(60):
        grid = (source.randint(1, 5), 2 * source.randint(1, 5), 2 * source.randint(1, 5))
        per_frame, side = grid[1] * grid[2] // 4, max(grid[1:]) // 2
        embeds = torch.randn(grid[0] * per_frame, 24, generator=generator)
        given = {"embeds": embeds, "grid": torch.tensor(grid), "seconds_per_grid": torch.tensor(3.5)}
        rate = torch.tensor(source.choice((0.0, 0.5, 0.9)), dtype=torch.float64)
        made = found.prune({**given, "rate": rate})
        frame_K = made["kept"] // per_frame
        ids, blocks, offsets = [0] * source.randint(0, 3), [], []
        start = len(ids)
        for frame in range(grid[0]):
            block = made["block"][:, frame_K == frame]
            ids += [*[0] * source.randint(0, 3), 1]
            offsets.append(len(ids))
            ids += [*[3] * block.shape[1], 2]
            empty += not block.numel()
            blocks.append(block if block.numel() else torch.tensor([[side], [side], [side], [side + 1]]))
        end = len(ids)
        ids += [0] * source.randint(0, 3)
        table, delta = placed(found, len(ids), offsets, blocks, is_pruned=True)
        video = PlacedMedia(modality="video", offset=start, length=end - start, grid=grid)
        wanted = frame_positions(ids, [video], [made["kept"]], rule)
        assert torch.equal(table, wanted.table_RN), grid
        assert torch.equal(delta, wanted.delta), grid
    assert empty > 10


def placed(
    found: Portable, num_tokens: int, offsets: Sequence[int], blocks: Sequence[Tensor], *, is_pruned: bool
) -> tuple[Tensor, Tensor]:
    given = {
        "num_tokens": torch.tensor(num_tokens),
        "offsets": torch.tensor(offsets, dtype=torch.int64),
        "lengths": torch.tensor([block.shape[1] for block in blocks], dtype=torch.int64),
        "blocks": torch.cat([torch.zeros(4, 0, dtype=torch.int64), *blocks], dim=1),
        "pruned": torch.tensor(is_pruned),
    }
    made = found.positions(given)
    return made["positions"], made["delta"]


@pytest.mark.seconds
def test_positions_of_random_prompts_are_those_of_the_host(family):
    found, _, _ = family("qwen2_5_vl")
    for seed in range(150):
        prompt = Prompt(seed)
        blocks, size = list(map(prompt.channels, prompt.items)), len(prompt.tokens(pruned=True))
        offsets = [item.offset for item in prompt.media(pruned=True)]
        by_extent = PositionOptions(pruned_resume="max")
        for is_pruned, options in ((True, PositionOptions()), (False, by_extent)):
            wanted = recompute_positions(size, offsets, blocks, options)
            table, delta = placed(found, size, offsets, blocks, is_pruned=is_pruned)
            assert torch.equal(table, wanted.table_RN), seed
            assert torch.equal(delta, wanted.delta), seed


def test_linear_positions_count_up_and_nothing_is_pruned(family):
    found, _, _ = family("minicpmv 4.5")
    assert found.prune is None
    made = found.positions({"num_tokens": torch.tensor(5)})
    wanted = initial_positions(range(5), [], PositionRule(kind="linear"))
    assert torch.equal(made["positions"], wanted.table_RN)
    assert torch.equal(made["delta"], wanted.delta)
