"""A run in Markdown: one table per workload, then growth; every cell, also the lost ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vlexport.bench.findings import (
    Finding,
    Growth,
    ceilings,
    findings,
    growth,
    is_void,
    kept_rounds,
    padding,
    slow_probe_of,
    twin,
)
from vlexport.bench.gains import table
from vlexport.bench.results import Cell, Result
from vlexport.errors import RequestError

BEGIN = "<!-- measured, written by `vlexport bench --page` -->"
END = "<!-- end of measured -->"

HEAD = (
    "| contender | seconds | times as fast as Hugging Face eager | share of the ceiling "
    "| kB per patch | relative L2 |"
)


def summary(result: Result) -> str:
    """Everything that the run found."""
    slow_probe = slow_probe_of(result.plan)
    lines = [_machine(result), ""]
    for cell in result.cells.values():
        lines += _cell(cell, slow_probe)
    for series in sorted({cell.series for cell in result.cells.values()} - {""}):
        rows = growth(result, series, slow_probe)
        lines += _growth_table(series, rows) if rows else []
    for question in result.questions.values():
        lines += table(question)
    return "\n".join(lines)


def _machine(result: Result) -> str:
    machine = result.machine
    versions = machine["versions"]
    assert isinstance(versions, dict)
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"Plan `{result.plan['name']}`, {machine['threads']} threads of {machine['processors']} processors "
        f"({machine['processor']}), {machine['memory_gib']} GiB; {listed}."
    )


def _cell(cell: Cell, slow_probe: float) -> Iterator[str]:
    yield f"### {cell.workload}"
    yield ""
    yield _circumstances(cell, slow_probe)
    yield ""
    yield HEAD
    yield "|---|---|---|---|---|---|"
    for finding in findings(cell, slow_probe):
        yield f"| {finding.name} | {_columns(finding)} |"
    yield ""


def _columns(finding: Finding) -> str:
    if finding.seconds is None:
        return f"{finding.entry.status}: {finding.entry.reason.replace('|', '/')} | | | | "
    share, grown, error = finding.of_ceiling, finding.growth_per_patch, finding.entry.relative_l2
    return " | ".join(
        [
            f"{finding.seconds:.3g}",
            str(finding.faster or ""),
            f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})" if share else "",
            f"{grown / 1000:.0f}" if grown else "",
            f"{error:.1e}" if error is not None else "",
        ]
    )


def _circumstances(cell: Cell, slow_probe: float) -> str:
    yardstick, kept = twin(cell, slow_probe), kept_rounds(cell, slow_probe)
    rates = ", ".join(
        f"{name.removeprefix('product in ')} {rate / 1e9:.0f}" for name, rate in ceilings(cell).items()
    )
    waste = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in padding(cell).items())
    loads = [each.load for each in cell.rounds]
    noise = "no twin ran" if yardstick is None else f"the twin is at {yardstick} of itself"
    doubt = " **Void: too noisy to tell contenders apart.**" if is_void(yardstick) else ""
    return (
        f"{cell.patches} patches, {cell.operations / 1e9:.0f} GFLOP needed; scores computed over needed: "
        f"{waste}. Products in GFLOP/s: {rates or 'none'}. {len(kept)} of {len(cell.rounds)} rounds count, "
        f"load average {min(loads, default=0.0):.1f} to {max(loads, default=0.0):.1f}, {noise}.{doubt}"
    )


def _growth_table(series: str, rows: list[Growth]) -> Iterator[str]:
    yield f"### Growth with {series}"
    yield ""
    yield "| contender | sizes | exponent of seconds | exponent of memory |"
    yield "|---|---|---|---|"
    for row in rows:
        memory = "" if row.of_memory is None else f"{row.of_memory:.2f}"
        yield f"| {row.name} | {row.sizes} | {row.of_seconds:.2f} | {memory} |"
    yield ""


def write_into(page: Path, result: Result) -> None:
    """Put the summary between the two marks of a page."""
    write_between(page, BEGIN, END, summary(result))


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks."""
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise RequestError(f"{page}: no place for the results; expected a line '{begin}' and a line '{end}'.")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")
