"""`list`, `doctor`, `demo` and `completion`: what is here, whether it works, and the workflow on it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.cli.options import BACKEND, BUNDLES_DIR, JSON, argument, flag, option
from vlexport.cli.output import data_is_out, show, show_json, show_table
from vlexport.cli.progress import phases
from vlexport.errors import MisfitError

if TYPE_CHECKING:
    from vlexport.backends import Backend


def list_(
    every: bool = flag("--all", "Show the vision classes of transformers that were tried too."),
    as_json: bool = JSON,
) -> None:
    """List recipes, backends and what works here."""
    from vlexport.backends import backend_names, find_backend, runs_here
    from vlexport.recipe import list_recipes, tried_classes

    recipes, backends = list_recipes(), [find_backend(name) for name in backend_names()]
    here = []
    for backend in backends:
        reason = backend.missing()
        runs = reason is None and runs_here(backend)
        here.append({"backend": backend.name, "builds": reason is None, "runs": runs, "reason": reason})
    pairs: list[dict[str, Any]] = [{"recipe": card.name, **state} for card in recipes for state in here]
    tried = tried_classes() if every else None
    if as_json:
        cards = [
            {"name": card.name, "model_types": card.model_types, "summary": card.summary} for card in recipes
        ]
        content = {"recipes": cards, "backends": list(map(_backend_json, backends)), "pairs": pairs}
        show_json("list", {**content, **({"transformers": tried} if tried else {})})
        return
    show_table(
        ("recipe", "model types", "summary"),
        [(card.name, ", ".join(card.model_types), card.summary) for card in recipes],
    )
    show_table(
        ("backend", "precision", "summary"),
        [
            (backend.name, ", ".join(cap.spelled for cap in backend.capabilities), backend.summary)
            for backend in backends
        ],
    )
    show_table(
        ("recipe", "backend", "here"), [(pair["recipe"], pair["backend"], _state(pair)) for pair in pairs]
    )
    if tried:
        _show_tried(tried)


def _state(pair: dict[str, Any]) -> str:
    return pair["reason"] or ("builds and runs" if pair["runs"] else "builds; engines run elsewhere")


def _show_tried(tried: Mapping[str, Any]) -> None:
    from vlexport.recipe import served_types

    rows = []
    for entry in tried["classes"]:
        name, failed = entry["model_type"], not entry["exports"]
        result = f"fails ({entry['step']}): {entry['reason']}" if failed else f"exports ({entry['form']})"
        rows.append((name, entry["class"], served_types().get(name, ""), result))
    version = f"class of transformers {tried['transformers']}"
    show_table(("model type", version, "own recipe", "generic recipe"), rows)


def _backend_json(backend: Backend) -> dict[str, object]:
    return {
        "name": backend.name,
        "dtypes": [
            capability.dtype for capability in backend.capabilities if capability.quantisation is None
        ],
        "extra": backend.extra,
        "quantise": [
            capability.quantisation.name for capability in backend.capabilities if capability.quantisation
        ],
        "summary": backend.summary,
        "missing": backend.missing(),
    }


def doctor(
    as_json: bool = JSON,
    deep: bool = flag("--deep", "Compare pixels, positions and pruning with stored values too (seconds)."),
) -> None:
    """Check libraries, hardware and backends."""
    from vlexport.tools.doctor import examine

    findings = examine(deep=deep)
    if as_json:
        show_json("doctor", {"findings": findings})
    else:
        show_table(("check", "state", "found", "do"), [finding.row() for finding in findings])
    broken = [finding.name for finding in findings if finding.state == "broken"]
    with data_is_out():
        if broken:
            raise MisfitError(f"not fit for use: {', '.join(broken)}. See the last column of the table.")


def demo(
    recipe: str | None = option("NAME", "Built-in recipe (default: the demo's own)."),
    backend: str = BACKEND,
    folder: Path = option(
        "DIR", "Directory for checkpoint, media and embeddings.", default=Path("demo-output")
    ),
    output_dir: Path = BUNDLES_DIR,
    as_json: bool = JSON,
) -> None:
    """Run the workflow on a tiny checkpoint, offline.

    Writes a checkpoint, trained for the default recipe and random for the others, builds and checks a bundle,
    encodes an image and a video, answers a question, and writes a picture and a report.
    """
    from vlexport.backends import find_backend, require

    require(find_backend(backend), "float32")
    from vlexport.tools.demo import default_recipe, run_demo

    with phases("demo") as progress:
        results = run_demo(recipe or default_recipe(), folder, output_dir, backend, progress)
    if as_json:
        show_json("demo", results)
        return
    for line in results.lines():
        show(line)


class Shell(StrEnum):
    """Shells with completion."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Shell = argument("SHELL", "bash, zsh or fish.")) -> None:
    """Print a completion script for a shell.

    In the file that the shell reads at its start: eval "$(vlexport completion bash)", or with zsh; for fish
    vlexport completion fish | source
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    show(get_completion_script(prog_name="vlexport", complete_var="_VLEXPORT_COMPLETE", shell=shell.value))
