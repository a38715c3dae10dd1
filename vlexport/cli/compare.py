"""`compare`: two bundles, accuracy tables, files of timings or of embeddings, or ONNX graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.cli.options import JSON, argument, flag, option
from vlexport.cli.output import is_verbose, print_line, show, show_json, show_report, show_table

if TYPE_CHECKING:
    from vlexport.reports.compare import Comparison, Difference, Nearest
    from vlexport.reports.features import ItemPair

# Tables of these widths fit 100 columns.
NAME, VALUE, SHARE = 26, 32, 28
DIGEST = 12
GRAPHS = ("graph", "nodes A", "nodes B", "differences")
ITEMS = ("item", "A", "B", "relative L2")
TIMES = ("contender", "ms A", "ms B", "B times as fast", "A vs ref.", "B vs ref.")
# A title, its columns and its rows.
Part = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def compare(
    first: Path = argument(
        "A", "A bundle, a file that --json of check or bench wrote, embeddings or *.onnx."
    ),
    second: Path = argument("B", "Another one of the same kind."),
    graph: str | None = option("FILE", "Compare this ONNX graph of bundles by operator, e.g. model.onnx."),
    allow_different: bool = flag(
        "--allow-different", "Compare although weights, devices or workloads differ."
    ),
    as_json: bool = JSON,
) -> None:
    """Compare two bundles, tables, timings, embeddings or graphs.

    Bundles: what they were made of, accuracy, ONNX graphs, sizes. Bench files: ratios of medians with 95 %
    intervals. Embeddings: which items have the same bits. Graphs: operators by the shape of their outputs,
    inputs, outputs and weights whose counts differ.
    """
    from vlexport.reports.compare import compare as compared

    comparison = compared(first, second, graph=graph, allow_different=allow_different)
    if as_json:
        show_json("compare", comparison.to_json())
        return
    places, summaries = (comparison.first, comparison.second), comparison.summaries or ("", "")
    for side, place, summary in zip("AB", places, summaries, strict=True):
        show(f"{side}  {place}")
        if summary:
            show_report(f"   {summary}")
    for reason in comparison.waived:
        print_line(f"compared all the same: {reason}")
    for title, columns, rows in _parts(comparison):
        show(f"\n{title}" if rows else f"\n{title}: the same")
        if rows:
            show_table(columns, rows)
    for side, names in zip("AB", comparison.unpaired, strict=True):
        for name in names:
            print_line(f"only in {side}: {name}")


def _parts(comparison: Comparison) -> Iterator[Part]:
    if comparison.kind == "graphs":
        (graph,) = comparison.graphs
        title = f"{graph.name}: {graph.nodes[0]} and {graph.nodes[1]} nodes"
        yield title, ("what", "name", "shape", "A", "B"), [tuple(map(str, row)) for row in graph.differences]
        return
    yield "identity", ("field", "A", "B"), list(_identity(comparison.identity))
    if comparison.summaries is not None:
        yield "accuracy, shares of the limits", ("level", "check", "A", "B"), list(_accuracy(comparison))
    if comparison.graphs:
        rows = [
            (graph.name, *map(str, graph.nodes), str(len(graph.differences) or "none"))
            for graph in comparison.graphs
        ]
        yield "graphs (--graph FILE lists the operators)", GRAPHS, rows
    if comparison.sizes:
        yield "sizes in bytes", ("file", "A", "B"), list(_sizes(comparison))
    for timing in comparison.timings:
        if timing.identity:
            title = f"identity of {_cut(Path(timing.name).name, 60)}"
            yield title, ("field", "A", "B"), list(_identity(timing.identity))
    if comparison.items:
        same = sum(item.first == item.second for item in comparison.items)
        rows = [
            (_cut(item.name, NAME), _value(item.first), _value(item.second), _error(item))
            for item in comparison.items
            if item.first != item.second
        ]
        yield f"items: {same} of {len(comparison.items)} have the same bits", ITEMS, rows
    if comparison.timings:
        yield "times", TIMES, list(_timings(comparison))


def _identity(differences: Sequence[Difference]) -> Iterator[tuple[str, ...]]:
    for difference in differences:
        yield _cut(difference.name, NAME), _value(difference.first), _value(difference.second)


def _value(value: object) -> str:
    text = "none" if value is None or value == {} else str(value)
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:DIGEST] if is_digest else _cut(text, VALUE)


def _error(item: ItemPair) -> str:
    return "" if item.error is None else f"{item.error:.1e}"


def _accuracy(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield for each check the row nearest to its limit on either side; every row with `--verbose`."""
    groups: dict[tuple[str, ...], list[tuple[str, Nearest | None, Nearest | None]]] = {}
    for row in comparison.rows:
        key = (row.level, row.check, row.shapes) if is_verbose() else (row.level, row.check)
        groups.setdefault(key, []).append((row.shapes, row.first, row.second))
    for (level, check, *_), rows in groups.items():
        sides = [max(((shapes, both[at]) for shapes, *both in rows), key=_rank) for at in (0, 1)]
        if is_verbose() or any(_is_listed(nearest) for _, nearest in sides):
            yield level, _cut(check, NAME), *(_nearest(shapes, nearest) for shapes, nearest in sides)


def _rank(side: tuple[str, Nearest | None]) -> tuple[bool, float]:
    nearest = side[1]
    return (nearest is not None and nearest.verdict != "passed", nearest.share or 0.0 if nearest else -1.0)


def _is_listed(nearest: Nearest | None) -> bool:
    return nearest is not None and (nearest.share is not None or nearest.verdict in ("failed", "blocked"))


def _nearest(shapes: str, nearest: Nearest | None) -> str:
    if nearest is None:
        return "not there"
    verdict = [] if nearest.verdict == "passed" else [nearest.verdict]
    share = [] if nearest.share is None else [f"{nearest.share:.0%}"]
    return _cut(", ".join([*verdict, *share, shapes]), SHARE)


def _sizes(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for name, sides in comparison.sizes.items():
        if sides[0] != sides[1]:
            yield _cut(name, NAME), *("not there" if size is None else f"{size:,}" for size in sides)
    totals = [sum(sides[at] or 0 for sides in comparison.sizes.values()) for at in (0, 1)]
    yield "all files", *(f"{size:,}" for size in totals)


def _timings(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for timing in comparison.timings:
        against = [f"{one.median:.2f}" if one else "" for one in timing.against_reference]
        times = [f"{value:.1f}" for value in timing.milliseconds]
        yield _cut(Path(timing.name).name, NAME), *times, str(timing.ratio), *against


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."
