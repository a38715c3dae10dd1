"""Calls of fixed sizes: the smallest that fits, padded, gives the rows of the call itself.

Where nothing can be captured a replay is a plain call on the padded buffers: all but capturing is tested.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backends.towers import Folder, errors, random_calls, sharp_checkpoint
from tests.golden_data import FOLDER
from vlexport.backends import EngineSpec, Options, cudagraphs, find_backend, require
from vlexport.backends.cudagraphs import PROGRAM, captured_calls, sizes_of
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError
from vlexport.export import export
from vlexport.graph import Graph
from vlexport.recipe import recipe_for
from vlexport.specs import MediaItem
from vlexport.vision import bounds
from vlexport.vision.static_shapes import max_windows, refill

FORM = "bounds"


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Graph:
    checkpoint = Checkpoint.open(sharp_checkpoint(tmp_path_factory.mktemp("sharp") / "checkpoint"))
    return export(recipe_for(checkpoint), checkpoint, form=FORM)


@pytest.fixture
def calls(graph: Graph, tmp_path: Path):
    """Captured calls for 8, 16, 32 tokens in up to 6 frames, on the CPU."""
    find_backend("cudagraphs").build(graph, Options(), tmp_path)
    assert graph.recipe.capture_sizes is not None
    sizes = [graph.recipe.capture_sizes(graph.config, budget, 6) for budget in (32, 8, 16)]
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    program = Folder(tmp_path).read(PROGRAM)
    return captured_calls(program, [{str(key): n for key, n in each.items()} for each in sizes], spec, "cpu")


def inputs_of(graph: Graph, *grids: tuple[int, int, int], seed: int = 0):
    random = torch.Generator().manual_seed(seed)
    width = graph.recipe.row_width(graph.config)
    items = [
        MediaItem(
            kind="image" if grid[0] == 1 else "video",
            patches=torch.randn(grid[0] * grid[1] * grid[2], width, generator=random),
            grid=grid,
        )
        for grid in grids
    ]
    return graph.recipe.prepare(graph.config, items, FORM)


MIXES = {
    "one cell": [(1, 2, 2)],
    "fills a budget": [(1, 4, 8)],
    "one more than a budget": [(1, 2, 18)],
    "frames": [(3, 4, 6), (1, 2, 2)],
    "as many frames as there may be": [(6, 2, 4)],
}


@pytest.mark.parametrize("name", MIXES)
def test_a_padded_call_gives_the_rows_of_the_call_itself(graph: Graph, calls, name: str) -> None:
    given = inputs_of(graph, *MIXES[name])
    expected = calls.function(dict(given))["embeds"]
    found = calls.run(given)["embeds"]
    assert (calls.num_replays, calls.num_as_they_are) == (1, 0)
    # Matrix products of other heights round differently: 2e-6 here, on values around 1.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_what_a_larger_call_left_behind_changes_nothing(graph: Graph, calls) -> None:
    given = inputs_of(graph, (1, 4, 6))
    first = calls.run(given)["embeds"]
    kept = first.clone()
    spoiled = inputs_of(graph, (4, 4, 2), seed=1)
    spoiled["patches"][:] = torch.nan
    calls.run(spoiled)
    assert torch.equal(first, kept)
    assert torch.equal(calls.run(given)["embeds"], kept)
    assert len(calls.captured) == 1


def test_each_call_takes_the_smallest_budget_and_larger_ones_run_as_they_are(graph: Graph, calls) -> None:
    for grids in ([(1, 4, 8)], [(1, 4, 8), (1, 2, 2)], [(1, 8, 16)], [(1, 8, 18)], [(7, 2, 2)]):
        calls.run(inputs_of(graph, *grids))
    assert sorted(calls.captured) == [0, 1, 2]
    assert (calls.num_replays, calls.num_as_they_are) == (3, 2)


def test_the_form_equals_the_reference_on_random_mixes(graph: Graph, calls) -> None:
    reference = graph.recipe.reference(graph.checkpoint)
    for items in random_calls(6, graph.recipe.row_width(graph.config), most_patches=800):
        given = graph.recipe.prepare(graph.config, items, FORM)
        relative, worst = errors(calls.function(given)["embeds"].detach(), reference.run(items)["embeds"])
        assert relative < 1e-5
        assert worst < 5e-5


def test_window_bounds_equal_the_reference() -> None:
    arrays = np.load(FOLDER / "q25_metadata.npz")
    cases = json.loads(bytes(arrays["__meta__"]))["cases"]
    checked = 0
    for index, case in enumerate(cases):
        if case["kind"] == "metadata":
            side = case["window_size"] // case["patch"] // case["merge"]
            tables = bounds.bound_tables(torch.tensor(case["grids"]), case["merge"], side)
            for ours, theirs in (("window_bounds", "cu_window_seqlens"), ("frame_bounds", "cu_seqlens")):
                # Recorded with or without room for more sequences; room repeats the last bound.
                recorded = torch.from_numpy(arrays[f"{index:04d}.out.{theirs}"])
                buffer = torch.full_like(recorded, -1)
                refill(buffer, tables[ours], bounds.PADDING[ours])
                assert torch.equal(buffer, recorded)
            assert tables["order"].tolist() == arrays[f"{index:04d}.out.window_index"].tolist()
            checked += 1
    assert checked == 24


def test_rows_behind_the_last_bound_are_zero_whatever_they_held() -> None:
    rows = torch.randn(6, 2, 4)
    rows[4:] = torch.nan
    out = bounds.bounded_attention(rows, rows, rows, torch.tensor([0, 3, 4, 4, 4], dtype=torch.int32), 3, 0.5)
    assert torch.equal(out[4:], torch.zeros(2, 2, 4))
    assert torch.isfinite(out[:4]).all()


def test_sizes_follow_the_budgets_rule(graph: Graph) -> None:
    found = sizes_of(graph)
    assert [each["tokens"] for each in found] == [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    assert [each["frame_bounds"] for each in found] == [65, 129, *[257] * 7]
    side = graph.config.window_side
    assert found[3]["window_bounds"] == max_windows(512, 256, 256, side) + 1


@pytest.mark.parametrize(
    ("device", "torch_version", "missing"),
    [
        ("none", "2.13.0", "there is no NVIDIA GPU, or no driver"),
        ("sm90", "2.13.0+cpu", r"torch 2\.13\.0\+cpu is built without CUDA"),
    ],
)
def test_the_backend_says_what_is_missing(monkeypatch, device, torch_version, missing) -> None:
    monkeypatch.setattr(cudagraphs, "device_here", lambda: device)
    monkeypatch.setattr(cudagraphs, "version", lambda _: torch_version)
    with pytest.raises(UnsupportedError, match=missing):
        require(find_backend("cudagraphs"), "bfloat16")


def test_a_bundle_says_where_it_belongs() -> None:
    target = find_backend("cudagraphs").target()
    assert (target.backend, target.device) == ("cudagraphs", "cuda")
