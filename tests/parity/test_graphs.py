"""The gate's rows on pruning and positions: graphs like their eager form pass, others do not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlexport._build.token_graphs import TokenGraphs, eager_graphs, open_graphs, planned_graphs, write_graphs
from vlexport.backends import Folder, Portable
from vlexport.backends.onnxruntime import BACKEND
from vlexport.onnx import portable as portable_graphs
from vlexport.parity.graphs import graph_rows, portable_rows
from vlexport.positions.plan import write_kept_positions, write_positions
from vlexport.pruning.cells import RULES
from vlexport.pruning.methods import METHODS
from vlexport.pruning.pixels import Chooser
from vlexport.pruning.selectors import Selection, eager
from vlexport.recipe import Recipe, find_recipe

RIGHT = eager_graphs("evs")
PLAIN = RIGHT.selection.run


def failed(graphs: TokenGraphs, dtype: str = "float32") -> set[str]:
    return {row.check for row in graph_rows(graphs, dtype) if row.verdict == "failed"}


def shifted(embeds, share):
    rows, kept = PLAIN(embeds, share)
    return rows, (kept + 1) % (embeds.shape[0] * embeds.shape[1])


def first_rows(embeds, share):
    return embeds.flatten(0, 1)[: len(share)], PLAIN(embeds, share)[1]


def last_of_equals(embeds, share):
    frames, per_frame = embeds.shape[:2]
    scores = METHODS["evs"].scores(embeds, share[0]).flatten()
    places = torch.arange(frames * per_frame)
    order = sorted(places.tolist(), key=lambda at: (-float(scores[at]), (at < per_frame and at) or -at))
    kept = torch.tensor(sorted(order[: len(share)]))
    return embeds.flatten(0, 1)[kept], kept


def without_the_first_frame(embeds, share):
    scores = METHODS["evs"].scores(embeds, share[0]).flatten()
    scores[: embeds.shape[1]] = 0.5
    kept = scores.topk(len(share)).indices.sort().values
    return embeds.flatten(0, 1)[kept], kept


WRONG_MASKS: dict[str, Callable] = {
    "kept tokens one too high": shifted,
    "rows of the first tokens": first_rows,
    "of equals the last": last_of_equals,
    "the first frame scored like others": without_the_first_frame,
    "another method": eager(METHODS["vidcom2"]).run,
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_a_wrong_mask_fails(name):
    wrong = replace(RIGHT, selection=Selection(selector=METHODS["evs"], run=WRONG_MASKS[name]))
    assert failed(wrong) == {"pruning graph"}


def axes_exchanged(plan, rows, anchor, by_width):
    return write_positions(plan, rows, anchor, by_width)[[0, 2, 1]]


def resumed_by_extent(plan, rows, anchor, by_width):
    return write_positions(plan, rows, anchor, False)


def from_zero(plan, rows, anchor, by_width):
    return write_positions(plan, rows, anchor * 0, by_width)


def delta_one_high(plan, cells, by_width):
    table, delta = write_kept_positions(plan, cells, by_width)
    return table, delta + 1


def frames_counted(plan, cells, by_width):
    times = torch.arange(len(cells.times_X))
    return write_kept_positions(plan, cells._replace(times_X=times), by_width)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"packaged_rows": each} for each in (axes_exchanged, resumed_by_extent, from_zero)),
        *({"packaged_kept": each} for each in (delta_one_high, frames_counted)),
    ],
    ids=lambda wrong: next(iter(wrong.values())).__name__,
)
def test_wrong_positions_fail(wrong):
    graphs = replace(RIGHT, form="compiled", dtype="float32", device="cpu", **wrong)
    assert failed(graphs) == {"positions graph"}


def broken(*_):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        ("pruning graph", {"selection": Selection(selector=METHODS["evs"], run=broken)}),
        ("positions graph", {"packaged_rows": broken}),
    ],
)
def test_a_graph_that_raises_fails_and_the_error_is_named(check, wrong):
    graphs = replace(RIGHT, form="compiled", dtype="float32", device="cpu", **wrong)
    (row,) = (row for row in graph_rows(graphs, "float32") if row.verdict == "failed")
    assert row.check == check
    assert "RuntimeError: no such kernel" in row.note


@dataclass(frozen=True)
class Pace:
    """How a family counts the cells and the time of a video."""

    merge: int = 2
    per_second: float = 2.0
    counts_frames: bool = False
    written: bool = False

    @property
    def recipe(self) -> Recipe[Any]:
        """A recipe whose config is a pace."""
        recipe: Any = find_recipe("qwen2_5_vl")
        language = replace(
            recipe.language, tokens_per_second=lambda pace: pace.per_second, counts_frames=self.counts_frames
        )
        rule = "time_as_text" if self.written else "time_scaled"
        packing: Any = lambda pace: SimpleNamespace(merge=pace.merge)  # noqa: E731
        return replace(recipe, packing=packing, language=language, position_rule=rule)


# Of recipes: integers, a float that float32 rounds, frames counted, time written out, merged by other sides.
PACES = {
    "2 positions a second": Pace(),
    "25/12 positions a second": Pace(per_second=25 / 12, merge=1),
    "frames counted": Pace(per_second=1.0, counts_frames=True),
    "time written out": Pace(per_second=1.0, written=True, merge=3),
}


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """Trace the selection and the positions once for all paces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable_graphs, "selection_model", cache(portable_graphs.selection_model))
        patch.setattr(portable_graphs, "mrope_positions", cache(portable_graphs.mrope_positions))
        yield


@cache
def portable(made: Pace) -> Portable:
    """The portable graphs of a family that counts so; its tables are none."""
    pace = 0.0 if made.written else made.per_second
    prune = portable_graphs.prune_graph(METHODS["evs"], made.merge, pace, made.counts_frames, made.written)
    positions = portable_graphs.mrope_positions()
    with tempfile.TemporaryDirectory() as folder:
        for name, graph in {"tables": positions, "prune": prune, "positions": positions}.items():
            Path(folder, f"{name}.onnx").write_bytes(graph.SerializeToString())
        return BACKEND.portable(Folder(Path(folder)), "evs")


def portable_failed(graphs: Portable, pace: Pace) -> set[str]:
    rows = portable_rows(graphs, METHODS["evs"], pace.recipe, pace)
    return {row.check for row in rows if row.verdict == "failed"}


@pytest.mark.seconds
@pytest.mark.parametrize("name", PACES)
def test_portable_graphs_pass_at_the_pace_of_their_recipe(name):
    assert portable_failed(portable(PACES[name]), PACES[name]) == set()


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["25/12 positions a second", "frames counted", "time written out"])
def test_portable_graphs_fail_at_the_pace_of_another_recipe(name):
    assert portable_failed(portable(Pace()), replace(PACES[name], merge=2)) == {"prune.onnx"}


def test_every_output_of_a_portable_graph_is_looked_at():
    right = portable(Pace())
    assert right.prune is not None
    changes = {
        "kept_embeds": lambda each: each.flip(0), "kept": lambda each: each.flip(0),
        **{f"block {row}": partial(one_more, row=row) for row in range(4)},
        "positions": lambda each: each + (torch.arange(each.shape[1]) == each.shape[1] - 1),
        "delta": lambda each: each + 1,
    }  # fmt: skip
    for name, change in changes.items():
        key, call = name.split()[0], right.positions if name in ("positions", "delta") else right.prune

        def changed(given, key=key, call=call, change=change):
            found = call(given)
            return {**found, key: change(found[key])}

        part: dict[str, Any] = {"positions" if call is right.positions else "prune": changed}
        wrong = replace(right, **part)
        assert len(portable_failed(wrong, Pace())) == 1, name


def one_more(block, row):
    """Wrong for the last token alone."""
    block = block.clone()
    block[row, -1] += 1
    return block


def test_a_graph_that_is_wrong_in_one_branch_fails():
    """Rates of 0, intervals below a second, and prompts that end with a medium have branches of their own."""
    right = portable(Pace())
    prune = right.prune
    assert prune is not None

    def doubled(given):
        found = prune(given)
        return {**found, "block": found["block"] * (1 + (given["rate"] == 0).long())}

    def late(given):
        found = prune(given)
        return {**found, "block": found["block"] + (given["rate"] > 0).long()}

    def counted(given):
        block = prune({**given, "seconds_per_grid": given["seconds_per_grid"].ceil()})["block"]
        return {**prune(given), "block": block}

    def cut(given):
        found = right.positions(given)
        ends = given["offsets"][-1] + given["lengths"][-1] == given["num_tokens"]
        return {**found, "delta": found["delta"] + int(ends)}

    faults: list[dict[str, Any]] = [
        {"prune": doubled},
        {"prune": late},
        {"prune": counted},
        {"positions": cut},
    ]
    for wrong in faults:
        assert len(portable_failed(replace(right, **wrong), Pace())) == 1, wrong


def test_positions_that_count_up_are_looked_at_too():
    recipe = replace(Pace().recipe, position_rule="linear")

    def counted(shift: int) -> Callable:
        return lambda given: {
            "positions": shift + torch.arange(int(given["num_tokens"]))[None],
            "delta": torch.tensor(shift),
        }

    for shift, verdict in ((0, "passed"), (1, "failed")):
        graphs = Portable(tables=counted(0), prune=None, positions=counted(shift))
        (row,) = portable_rows(graphs, METHODS["evs"], recipe, Pace())
        assert (row.check, row.verdict) == ("positions.onnx", verdict)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("evs", "float32"),
        *(
            pytest.param(method, dtype, marks=pytest.mark.full)
            for method in sorted(METHODS)
            for dtype in ("float32", "bfloat16", "float16")
            if (method, dtype) != ("evs", "float32")
        ),
    ],
)
def test_packages_pass(tmp_path, method, dtype):
    folder = tmp_path / "bundle"
    folder.mkdir()
    graphs = open_graphs(write_graphs(planned_graphs(method, "cpu"), folder, dtype), Folder(folder), dtype)
    assert (graphs.form, failed(graphs, dtype)) == ("compiled", set())


def best_from_the_end(scores, count):
    return (scores.shape[0] - 1 - scores.flip(0).topk(count).indices).sort().values


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scores", "ties", "resume"])
def test_packages_of_wrong_programs_fail(tmp_path, monkeypatch, kind):
    """Bugs are planted before the packages are compiled, in a cache of their own."""
    from vlexport._build import token_graphs
    from vlexport.pruning import evs, selectors

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if kind == "scores":
        monkeypatch.setattr(evs, "FIRST_FRAME", 0.5)
    elif kind == "ties":
        monkeypatch.setattr(selectors, "best", best_from_the_end)
    else:
        monkeypatch.setattr(token_graphs, "write_positions", resumed_by_extent)
    folder = tmp_path / "bundle"
    folder.mkdir()
    identity = write_graphs(planned_graphs("evs", "cpu"), folder, "float32")
    monkeypatch.undo()
    assert failed(open_graphs(identity, Folder(folder), "float32")) == {
        "positions graph" if kind == "resume" else "pruning graph"
    }


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_package_that_chooses_other_cells_is_found(name):
    right = replace(RIGHT, packaged_cells={name: Chooser(name)})
    row = next(row for row in graph_rows(right, "float32") if row.check == "cells graph")
    assert (row.verdict, row.note) == ("passed", f"{name}, compiled")

    def one_less(cells, room):
        kept, count = Chooser(name)(cells, room)
        return kept.roll(1), count

    wrong = replace(right, packaged_cells={name: one_less})
    assert next(row for row in graph_rows(wrong, "float32") if row.check == "cells graph").verdict == "failed"
