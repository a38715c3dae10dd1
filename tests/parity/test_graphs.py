"""The gate's rows on pruning and positions: right graphs pass in every form and dtype, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from vlexport.backends import Folder
from vlexport.parity.graphs import graph_rows
from vlexport.positions.plan import write_kept_positions, write_positions
from vlexport.pruning.methods import METHODS
from vlexport.pruning.selectors import Selection, eager
from vlexport.token_graphs import TokenGraphs, eager_graphs, open_graphs, planned_graphs, write_graphs

RIGHT = eager_graphs("evs")
PLAIN = RIGHT.selection.run


def failed(graphs: TokenGraphs, dtype: str = "float32", rule: str = "time_scaled") -> set[str]:
    rows = graph_rows(graphs, dtype, rule)
    return {row.check for row in rows if row.verdict == "failed"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_right_graphs_pass_in_every_dtype(method, dtype):
    assert failed(eager_graphs(method), dtype, "time_as_text") == set()


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


def test_wrong_positions_of_written_time_fail_in_a_row_of_their_own():
    graphs = replace(RIGHT, form="compiled", dtype="float32", device="cpu", packaged_rows=axes_exchanged)
    assert failed(graphs, rule="time_as_text") == {"positions graph", "positions graph, written time"}


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
    return (len(scores) - 1 - scores.flip(0).topk(count).indices).sort().values


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scores", "ties", "resume"])
def test_packages_of_wrong_programs_fail(tmp_path, monkeypatch, kind):
    """Bugs are planted before the packages are compiled, in a cache of their own."""
    from vlexport import token_graphs
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
