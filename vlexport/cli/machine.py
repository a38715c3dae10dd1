"""`list` and `doctor`: what vlexport serves, and what this machine can do."""

from __future__ import annotations

import typer

from vlexport.cli.output import show_json, show_table
from vlexport.errors import MisfitError


def register(app: typer.Typer) -> None:
    app.command("list")(list_)
    app.command()(doctor)


def list_(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Recipes and backends: what each serves, and what this machine can build or run."""
    from vlexport.backends import backend_names, find_backend
    from vlexport.recipe import list_recipes

    recipes = [
        {"name": card.name, "model_types": list(card.model_types), "summary": card.summary}
        for card in list_recipes()
    ]
    backends = [
        {
            "name": backend.name,
            "dtypes": [each.dtype for each in backend.capabilities],
            "summary": backend.summary,
            "missing": backend.missing(),
        }
        for backend in map(find_backend, backend_names())
    ]
    if as_json:
        show_json("list", {"recipes": recipes, "backends": backends})
        return
    show_table(
        ("recipe", "model types", "summary"),
        [(each["name"], ", ".join(each["model_types"]), each["summary"]) for each in recipes],
    )
    show_table(
        ("backend", "dtypes", "here", "summary"),
        [
            (each["name"], ", ".join(each["dtypes"]), each["missing"] or "ready", each["summary"])
            for each in backends
        ],
    )


def doctor(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Check this machine: versions, memory, disk, locks, devices, backends."""
    from vlexport.doctor import examine

    findings = examine()
    if as_json:
        show_json("doctor", {"findings": [each.to_json() for each in findings]})
    else:
        show_table(("check", "state", "found", "do"), [each.row() for each in findings])
    broken = [each.name for each in findings if each.state == "broken"]
    if broken:
        raise MisfitError(f"not fit for use: {', '.join(broken)}. The table says what to do.")
