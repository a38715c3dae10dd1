"""`diff` of two ONNX graphs, and `completion` for shells."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from vlexport.cli.options import JSON, TRUST
from vlexport.cli.output import print_line, show, show_json, show_table
from vlexport.errors import RequestError
from vlexport.os_errors import shortage

GRAPH = typer.Option("model.onnx", metavar="FILE", help="Graph of a bundle to compare.")


def diff(
    first: Path = typer.Argument(metavar="A", help="A .onnx file, or a bundle."),
    second: Path = typer.Argument(metavar="B", help="Another one."),
    graph: str = GRAPH,
    trust: str = TRUST,
    as_json: bool = JSON,
) -> None:
    """Compare two ONNX graphs by operator and shape.

    Rows are operators by the shape of their outputs, inputs, outputs and weights whose counts differ.
    `vlexport compare` is for results and identity of bundles.
    """
    from vlexport.onnx.diff import differences, num_nodes, parts_of

    parts = [parts_of(_read(place, graph, trust), str(place)) for place in (first, second)]
    found = differences(*parts)
    nodes = [num_nodes(each) for each in parts]
    if as_json:
        names = ("kind", "name", "shape", "first", "second")
        rows = [dict(zip(names, row, strict=True)) for row in found]
        show_json("diff", {"first": str(first), "second": str(second), "nodes": nodes, "differences": rows})
        return
    show_table(("what", "name", "shape", "A", "B"), [tuple(map(str, row)) for row in found])
    print_line(f"{nodes[0]} and {nodes[1]} nodes; {len(found) or 'no'} differences")


def _read(place: Path, graph: str, trust: str | None) -> bytes:
    from vlexport.bundle import Bundle

    if place.is_dir():
        return Bundle.open(place, trust=trust, verify="lazy").read(graph)
    try:
        return place.read_bytes()
    except OSError as error:
        raise shortage(error) or RequestError(
            f"{place}: cannot be read ({error.strerror}). Pass a .onnx file or a bundle."
        ) from error


class Shell(StrEnum):
    """Shells with completion."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Shell = typer.Argument(metavar="SHELL", help="bash, zsh or fish.")) -> None:
    """Print a completion script for a shell.

    In the file that the shell reads at its start: eval "$(vlexport completion bash)", or with zsh; for fish
    vlexport completion fish | source
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    show(get_completion_script(prog_name="vlexport", complete_var="_VLEXPORT_COMPLETE", shell=shell.value))
