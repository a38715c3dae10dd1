"""`list`, `doctor`, `explain` and `demo`: what is here, whether it works, and the workflow on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from vlexport.cli.options import BACKEND, BUNDLES_DIR, JSON, argument, flag, option
from vlexport.cli.output import data_is_out, show, show_json, show_table
from vlexport.cli.progress import phases
from vlexport.errors import MisfitError


def list_(
    every: bool = flag("--all", "Show the vision classes of transformers that were tried too."),
    as_json: bool = JSON,
) -> None:
    """List recipes and the model types that they build."""
    from vlexport.recipe import list_recipes, tried_classes

    recipes, tried = list_recipes(), tried_classes() if every else None
    if as_json:
        cards = [
            {"name": card.name, "model_types": card.model_types, "summary": card.summary} for card in recipes
        ]
        show_json("list", {"recipes": cards, **({"transformers": tried} if tried else {})})
        return
    show_table(
        ("recipe", "model types", "summary"),
        [(card.name, ", ".join(card.model_types), card.summary) for card in recipes],
    )
    if tried:
        _show_tried(tried)


def _show_tried(tried: Mapping[str, Any]) -> None:
    from vlexport.recipe import served_types

    rows = []
    for entry in tried["classes"]:
        name, failed = entry["model_type"], not entry["exports"]
        result = f"fails ({entry['step']}): {entry['reason']}" if failed else f"exports ({entry['form']})"
        rows.append((name, entry["class"], served_types().get(name, ""), result))
    version = f"class of transformers {tried['transformers']}"
    show_table(("model type", version, "own recipe", "generic recipe"), rows)


def explain(
    code: str | None = argument("CODE", "Code of an error or of a row of the accuracy check.", default=None),
    as_json: bool = JSON,
) -> None:
    """Explain a code that an error or the accuracy check prints.

    Without a code, list all.
    """
    from vlexport.tools.explain import find_page, pages

    if code is None:
        listed = pages()
        if as_json:
            show_json("explain", {"codes": {name: page.summary for name, page in listed.items()}})
            return
        show_table(("code", "means"), [(name, page.summary) for name, page in listed.items()])
        return
    page = find_page(code)
    if as_json:
        show_json("explain", page)
        return
    exits = "" if page.exit_code is None else f" (exit code {page.exit_code})"
    show(f"{page.code}{exits}: {page.summary}")
    show(f"Causes: {page.causes}")
    show(f"What to do: {page.remedy}")


def doctor(
    as_json: bool = JSON,
    deep: bool = flag("--deep", "Compare pixels, positions and pruning with stored values too (seconds)."),
) -> None:
    """Check libraries, hardware and backends, and list their precisions."""
    from vlexport.tools.doctor import doctor as examined

    diagnosis = examined(deep=deep)
    if as_json:
        show_json("doctor", diagnosis.to_json())
    else:
        show_table(("check", "state", "found", "do"), list(map(astuple, diagnosis.findings)))
        show_table(
            ("backend", "precision", "summary"),
            [
                (backend.name, ", ".join(cap.spelled for cap in backend.capabilities), backend.summary)
                for backend in diagnosis.backends
            ],
        )
    with data_is_out():
        if broken := diagnosis.broken:
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
