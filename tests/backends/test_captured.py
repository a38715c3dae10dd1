"""Calls of fixed sizes: the smallest that fits, padded, gives the rows of the call itself.

Where nothing can be captured a replay is a plain call on the padded buffers: all but capturing is tested.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from benchmarks.towers import random_items
from tests.backends.towers import RELATIVE_L2, WORST_TOKEN, errors, random_calls, sharp_checkpoint
from tests.devices import stand_in
from tests.golden_data import FOLDER
from vlexport._build.export import export
from vlexport._build.graph import Graph
from vlexport.backends import EngineSpec, Folder, Options, cudagraphs, find_backend, require
from vlexport.backends._captured import CapturedCalls, as_call
from vlexport.backends.cudagraphs import captured_calls, sizes_of
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError, MisfitError
from vlexport.recipe import recipe_for
from vlexport.vision import grid
from vlexport.vision.attention import cu_seqlens, kernels, layout
from vlexport.vision.attention.cu_seqlens import is_bounds
from vlexport.vision.attention.kernels import bounded_attention
from vlexport.vision.attention.segmentation import Segmentation
from vlexport.vision.static_shapes import max_windows, refill

FORM = "cu_seqlens"


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Graph:
    checkpoint = Checkpoint.open(sharp_checkpoint(tmp_path_factory.mktemp("sharp") / "checkpoint", depth=2))
    return export(recipe_for(checkpoint), checkpoint, form=FORM)


@pytest.fixture(scope="module")
def program(graph: Graph, tmp_path_factory) -> Folder:
    folder = tmp_path_factory.mktemp("program")
    find_backend("cudagraphs").build(graph, Options(), folder)
    return Folder(folder)


@pytest.fixture
def calls(graph: Graph, program: Folder):
    """Captured calls for 8, 16, 32 tokens in up to 6 frames, on the CPU."""
    sizes = [graph.recipe.packing(graph.config).capture_sizes(budget, 6) for budget in (32, 8, 16)]
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    return captured_calls(program, [{str(key): n for key, n in each.items()} for each in sizes], spec, "cpu")


def inputs_of(graph: Graph, *grids: tuple[int, int, int], seed: int = 0):
    items = random_items(graph.recipe, graph.config, grids, seed)
    return graph.recipe.prepare(graph.config, items, FORM)


MIXES = {
    "one cell": [(1, 2, 2)],
    "fills a budget": [(1, 4, 8)],
    "one more than a budget": [(1, 2, 18)],
    "frames": [(3, 4, 6), (1, 2, 2)],
    "as many frames as there may be": [(6, 2, 4)],
}


@pytest.mark.seconds
def test_a_padded_call_gives_the_rows_of_the_call_itself(graph: Graph, calls) -> None:
    for name, grids in MIXES.items():
        given = inputs_of(graph, *grids)
        expected = calls.function(dict(given))["embeds"]
        # Matrix products of other heights round differently: 2e-6 here, on values around 1.
        torch.testing.assert_close(calls.run(given)["embeds"], expected, atol=1e-5, rtol=0, msg=name)
    assert (calls.num_replays, calls.num_as_they_are) == (len(MIXES), 0)


def test_rows_stay_on_the_device_that_the_backend_names(graph: Graph, program: Folder) -> None:
    """Of torch_tensorrt too, whose programs are called the same way; a function stands in for the program."""
    sizes = graph.recipe.packing(graph.config).capture_sizes(32, 6)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    on_gpu = CapturedCalls(lambda given: {"embeds": given["patches"][::4]}, spec, [sizes], "cuda", as_call)
    given = inputs_of(graph, (1, 4, 6))
    with stand_in():
        rows = on_gpu.run(given)["embeds"]
    assert rows.device.type == find_backend("cudagraphs").rows_on
    assert torch.equal(rows.cpu(), given["patches"][::4])


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
        assert relative < RELATIVE_L2
        assert worst < WORST_TOKEN


def bound_tables(grids, merge: int, side: int):
    kinds = (Segmentation(name="window", largest=side**2), Segmentation(name="frame"))
    found = {"window": grid.windows(grids, merge, side), "frame": grid.frames(grids, merge)}
    return {name: each.int() for name, each in layout.tables(FORM, kinds, found, merge**2).items()}


def test_window_bounds_equal_the_reference() -> None:
    arrays = np.load(FOLDER / "q25_metadata.npz")
    cases = json.loads(bytes(arrays["__meta__"]))["cases"]
    checked = 0
    for index, case in enumerate(cases):
        if case["kind"] == "metadata":
            side = case["window_size"] // case["patch"] // case["merge"]
            tables = bound_tables(torch.tensor(case["grids"]), case["merge"], side)
            for ours, theirs in (("window_bounds", "cu_window_seqlens"), ("frame_bounds", "cu_seqlens")):
                # Recorded with or without room for more sequences; room repeats the last bound.
                recorded = torch.from_numpy(arrays[f"{index:04d}.out.{theirs}"])
                buffer = torch.full_like(recorded, -1)
                assert is_bounds(ours)
                refill(buffer, tables[ours], "repeat_last")
                assert torch.equal(buffer, recorded)
            assert tables["order"].tolist() == arrays[f"{index:04d}.out.window_index"].tolist()
            checked += 1
    assert checked == 24


def test_sizes_follow_the_budgets_rule(graph: Graph) -> None:
    found = sizes_of(graph)
    few, many = found[::2], found[1::2]
    # Twice as large each, and from 1,024 on half as large again between them.
    budgets = [64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]
    for sizes in (few, many):
        assert [each["tokens"] for each in sizes] == budgets
    assert {each["frame_bounds"] for each in few} == {9}
    assert [each["frame_bounds"] for each in many] == [65, 129, *[257] * 11]
    # One frame may be the whole budget where there are few; of many none is much longer than the mean.
    assert [each["frame_cells"] for each in few] == budgets
    assert [each["frame_cells"] for each in many] == [64, 128, 256, 512, *[1024] * 9]
    packing: Any = graph.recipe.packing(graph.config)
    side = packing.window_side
    assert many[3]["window_bounds"] == max_windows(512, 256, 256, side) + 1


def test_the_longest_frame_of_the_call_reaches_the_kernel(graph: Graph, monkeypatch) -> None:
    """Windows by their largest size, frames by the longest of the call, both in rows."""
    tables = bound_tables(torch.tensor([[1, 4, 6], [3, 8, 10], [1, 2, 2]]), 2, 4)
    assert len(tables["longest_frame"]) == 4 * 5
    rows = torch.randn(6, 2, 4)
    with pytest.raises(InputError, match="a segment of 4 rows given, 3 at most"):
        bounded_attention(rows, rows, rows, torch.tensor([0, 4], dtype=torch.int32), 3, 0.5)
    module = graph.recipe.tower(graph.checkpoint, "float32")
    seen = []

    def attend(q, k, v, bounds_B, longest, scale):
        seen.append(longest)
        return q.clone()

    monkeypatch.setattr(cu_seqlens, "bounded_attention", attend)
    with torch.inference_mode():
        module(inputs_of(graph, (2, 4, 6), (1, 2, 2)))
    packing: Any = graph.recipe.packing(graph.config)
    assert set(seen) == {packing.window_side**2 * 4, 24}


def stand_in_kernel(out, q, k, v, queries_B, bounds_B, longest_q, longest_k, *, scale):
    """Attend as the CUDA kernel does: only rows between bounds are written."""
    for (first, last), (start, stop) in zip(
        itertools.pairwise(queries_B.tolist()), itertools.pairwise(bounds_B.tolist()), strict=True
    ):
        assert last - first <= longest_q
        assert stop - start <= longest_k
        rows_q, keys, values = (
            rows.transpose(0, 1) for rows in (q[first:last], k[start:stop], v[start:stop])
        )
        mixed = F.scaled_dot_product_attention(rows_q, keys, values, scale=scale)
        out[first:last] = mixed.transpose(0, 1)


@pytest.mark.parametrize("has_out", [True, False], ids=["varlen_attn_out", "varlen_attn"])
def test_every_kernel_of_torch_leaves_rows_behind_the_last_bound_zero(monkeypatch, has_out: bool) -> None:
    def allocating(q, *others, scale):
        out = torch.full_like(q, torch.nan)
        stand_in_kernel(out, q, *others, scale=scale)
        return out

    # torch 2.11 has none to take away.
    monkeypatch.delattr(varlen, "varlen_attn_out", raising=False)
    monkeypatch.setattr(varlen, "varlen_attn", allocating)
    if has_out:
        monkeypatch.setattr(varlen, "varlen_attn_out", stand_in_kernel, raising=False)
        monkeypatch.delattr(varlen, "varlen_attn")
    rows, bounds_B = torch.randn(7, 2, 8), torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    rows[5:] = torch.nan
    found = kernels.by_kernel((rows, rows, rows), (bounds_B, bounds_B), (3, 3), 0.5)
    plain = bounded_attention(rows, rows, rows, bounds_B, 3, 0.5)
    torch.testing.assert_close(found, plain)
    for rows in (found, plain):
        assert torch.equal(rows[5:], torch.zeros(2, 2, 8))


@pytest.mark.seconds
def test_a_capture_that_failed_is_not_tried_again(graph: Graph, calls) -> None:
    tried = []

    def capture(function, buffers):
        tried.append(len(buffers["patches"]))
        raise RuntimeError("operation not permitted when stream is capturing")

    calls.capture = capture
    given = inputs_of(graph, (1, 4, 6))
    for _ in range(3):
        torch.testing.assert_close(calls.run(given)["embeds"], calls.function(given)["embeds"])
    assert tried == [32]
    assert (calls.num_replays, calls.num_as_they_are) == (0, 3)
    assert "not permitted" in calls.failures[0]


def test_a_capture_without_memory_is_tried_again(graph: Graph, calls) -> None:
    def capture(function, buffers):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    plain, calls.capture = calls.capture, capture
    with pytest.raises(torch.cuda.OutOfMemoryError):
        calls.run(inputs_of(graph, (1, 4, 6)))
    calls.capture = plain
    calls.run(inputs_of(graph, (1, 4, 6)))
    assert calls.num_replays == 1


@pytest.mark.seconds
def test_warming_up_captures_every_budget_once_and_the_largest_first(graph: Graph, calls) -> None:
    tried, plain = [], calls.capture

    def capture(function, buffers):
        tried.append(len(buffers["patches"]) // 4)
        return plain(function, buffers)

    calls.capture = capture
    calls.warm_up()
    calls.warm_up()
    calls.run(inputs_of(graph, (1, 4, 6)))
    assert tried == [32, 16, 8]
    assert calls.budgets == (8, 16, 32)


def machine(monkeypatch, device: str, version: str):
    monkeypatch.setattr(cudagraphs, "device_here", lambda: device)
    monkeypatch.setattr(cudagraphs, "version", lambda _: version)
    return find_backend("cudagraphs")


def test_the_backend_reports_what_is_missing_and_serves_what_is_new_enough(monkeypatch) -> None:
    for device, torch_version, missing in (
        ("none", "2.13.0", "there is no NVIDIA GPU, or no driver"),
        ("sm75", "2.13.0", "the GPU is sm75; attention in half precision needs sm80"),
        ("sm90", "2.10.1+cu128", r"torch 2\.10\.1\+cu128 has no varlen_attn with a scale"),
        ("sm90", "2.13.0+cpu", r"torch 2\.13\.0\+cpu is built without CUDA"),
    ):
        with pytest.raises(MisfitError, match=missing):
            require(machine(monkeypatch, device, torch_version), "bfloat16")
    for device, torch_version in (("sm80", "2.11.0+cu130"), ("sm120", "3.0.0")):
        backend = machine(monkeypatch, device, torch_version)
        assert backend.missing() is None
        assert (backend.target().backend, backend.target().device) == ("cudagraphs", "cuda")
