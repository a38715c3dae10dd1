"""`compare`: two bundles, accuracy tables or files of timings, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlexport.cli.options import JSON, TRUST
from vlexport.cli.output import is_verbose, print_line, show, show_json, show_report, show_table

if TYPE_CHECKING:
    from vlexport.report.compare import Comparison, Difference, Nearest

# Tables of these widths fit 100 columns.
NAME, VALUE, SHARE = 26, 32, 28
DIGEST = 12


def compare(
    first: Path = typer.Argument(
        metavar="A", help="A bundle, or a file that --json of parity or bench wrote."
    ),
    second: Path = typer.Argument(metavar="B", help="Another one of the same kind."),
    allow_different: bool = typer.Option(
        False, "--allow-different", help="Compare although weights, devices or workloads differ."
    ),
    trust: str = TRUST,
    as_json: bool = JSON,
) -> None:
    """Compare two bundles, accuracy tables or bench files.

    Bundles: what they were made of, accuracy, ONNX graphs, sizes. Bench files: ratios of medians with 95 %
    intervals. `vlexport diff` compares two ONNX graphs operator by operator.
    """
    from vlexport.report.compare import compare as compared

    found = compared(first, second, trust=trust, allow_different=allow_different)
    if as_json:
        show_json("compare", found.to_json())
        return
    for side, place, summary in zip(
        "AB", (found.first, found.second), found.summaries or ("", ""), strict=True
    ):
        show(f"{side}  {place}")
        if summary:
            show_report(f"   {summary}")
    for reason in found.waived:
        print_line(f"compared all the same: {reason}")
    for title, columns, rows in _tables(found):
        show(f"\n{title}" if rows else f"\n{title}: the same")
        if rows:
            show_table(columns, rows)
    for side, names in zip("AB", found.unpaired, strict=True):
        for name in names:
            print_line(f"only in {side}: {name}")


def _tables(found: Comparison) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield title, columns and rows of each part."""
    yield "identity", ("field", "A", "B"), list(_identity(found.identity))
    if found.summaries is not None:
        yield "accuracy, shares of the limits", ("level", "check", "A", "B"), list(_accuracy(found))
    if found.graphs:
        graphs = [
            (each.name, *map(str, each.nodes), str(len(each.differences) or "none")) for each in found.graphs
        ]
        yield (
            "graphs (vlexport diff has the operators)",
            ("graph", "nodes A", "nodes B", "differences"),
            graphs,
        )
    if found.sizes:
        yield "sizes in bytes", ("file", "A", "B"), list(_sizes(found))
    for each in found.timings:
        if each.identity:
            yield (
                f"identity of {_cut(Path(each.name).name, 60)}",
                ("field", "A", "B"),
                list(_identity(each.identity)),
            )
    if found.timings:
        columns = ("contender", "ms A", "ms B", "B times as fast", "A vs ref.", "B vs ref.")
        yield "times", columns, list(_timings(found))


def _identity(differences: Sequence[Difference]) -> Iterator[tuple[str, ...]]:
    for each in differences:
        yield _cut(each.name, NAME), *(_value(value) for value in (each.first, each.second))


def _value(value: object) -> str:
    text = "none" if value is None or value == {} else str(value)
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:DIGEST] if is_digest else _cut(text, VALUE)


def _accuracy(found: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield for each check the row nearest to its limit on either side; every row with `--verbose`."""
    groups: dict[tuple[str, ...], list[tuple[str, Nearest | None, Nearest | None]]] = {}
    for row in found.rows:
        key = (row.level, row.check, row.shapes) if is_verbose() else (row.level, row.check)
        groups.setdefault(key, []).append((row.shapes, row.first, row.second))
    for (level, check, *_), rows in groups.items():
        sides = [max(((shapes, each[at]) for shapes, *each in rows), key=_rank) for at in (0, 1)]
        if is_verbose() or any(_is_listed(each) for _, each in sides):
            yield level, _cut(check, NAME), *(_nearest(shapes, each) for shapes, each in sides)


def _rank(side: tuple[str, Nearest | None]) -> tuple[bool, float]:
    each = side[1]
    return (each is not None and each.verdict != "passed", each.share or 0.0 if each else -1.0)


def _is_listed(each: Nearest | None) -> bool:
    """Return whether a row shows more than that its integers are right."""
    return each is not None and (each.share is not None or each.verdict in ("failed", "blocked"))


def _nearest(shapes: str, each: Nearest | None) -> str:
    if each is None:
        return "not there"
    verdict = [] if each.verdict == "passed" else [each.verdict]
    share = [] if each.share is None else [f"{each.share:.0%}"]
    return _cut(", ".join([*verdict, *share, shapes]), SHARE)


def _sizes(found: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield files whose sizes differ, and the sum of all."""
    for name, sides in found.sizes.items():
        if sides[0] != sides[1]:
            yield _cut(name, NAME), *("not there" if each is None else f"{each:,}" for each in sides)
    totals = [sum(sides[at] or 0 for sides in found.sizes.values()) for at in (0, 1)]
    yield "all files", *(f"{each:,}" for each in totals)


def _timings(found: Comparison) -> Iterator[tuple[str, ...]]:
    for each in found.timings:
        against = [f"{one.median:.2f}" if one else "" for one in each.against_reference]
        times = [f"{value:.1f}" for value in each.milliseconds]
        yield _cut(Path(each.name).name, NAME), *times, str(each.ratio), *against


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."
