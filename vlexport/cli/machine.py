"""`list`, `doctor` and `demo`: recipes, backends, the state of this machine, and the whole workflow on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlexport.cli.options import BACKEND, BUNDLES_DIR, JSON
from vlexport.cli.output import data_is_out, show, show_json, show_table
from vlexport.cli.progress import phases
from vlexport.errors import MisfitError

if TYPE_CHECKING:
    from vlexport.backends import Backend
    from vlexport.recipe import RecipeCard

DEEP = typer.Option(
    False, "--deep", help="Compare pixels, positions and pruning with stored values too (seconds)."
)


ALL = typer.Option(
    False, "--all", help="Show the vision classes of transformers that the generic recipe was tried on too."
)


def list_(every: bool = ALL, as_json: bool = JSON) -> None:
    """List recipes, backends and what works here."""
    from vlexport.backends import backend_names, find_backend
    from vlexport.recipe import list_recipes, served_types, tried_classes

    recipes, backends = list_recipes(), [find_backend(name) for name in backend_names()]
    pairs = [_Pair.of(card, backend) for card in recipes for backend in backends]
    if as_json:
        content = {
            "recipes": [
                {"name": card.name, "model_types": card.model_types, "summary": card.summary}
                for card in recipes
            ],
            "backends": [_backend_json(backend) for backend in backends],
            "pairs": [asdict(pair) for pair in pairs],
            **({"transformers": tried_classes()} if every else {}),
        }
        show_json("list", content)
        return
    show_table(
        ("recipe", "model types", "summary"),
        [(card.name, ", ".join(card.model_types), card.summary) for card in recipes],
    )
    show_table(
        ("backend", "precision", "summary"),
        [(each.name, ", ".join(cap.spelled for cap in each.capabilities), each.summary) for each in backends],
    )
    show_table(("recipe", "backend", "here"), [(pair.recipe, pair.backend, pair.status()) for pair in pairs])
    if every:
        tried, own = tried_classes(), served_types()
        show_table(
            ("model type", f"class of transformers {tried['transformers']}", "own recipe", "generic recipe"),
            [
                (name := each["model_type"], each["class"], own.get(name, ""), _came_of(each))
                for each in tried["classes"]
            ],
        )


def _came_of(tried: Mapping[str, Any]) -> str:
    """Return what came of a class: what it takes, or where it failed and why."""
    return f"exports ({tried['form']})" if tried["exports"] else f"fails ({tried['step']}): {tried['reason']}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """A recipe with a backend on this machine: whether it builds and runs, and if not, why."""

    recipe: str
    backend: str
    builds: bool
    runs: bool
    reason: str | None

    @classmethod
    def of(cls, card: RecipeCard, backend: Backend) -> _Pair:
        from vlexport.backends import runs_here

        reason = backend.missing()
        runs = reason is None and runs_here(backend)
        return cls(recipe=card.name, backend=backend.name, builds=reason is None, runs=runs, reason=reason)

    def status(self) -> str:
        return self.reason or ("builds and runs" if self.runs else "builds; engines run elsewhere")


def _backend_json(backend: Backend) -> dict[str, object]:
    dtypes = [each.dtype for each in backend.capabilities if each.quantisation is None]
    named = {"name": backend.name, "dtypes": dtypes, "extra": backend.extra}
    quantised = [each.quantisation.name for each in backend.capabilities if each.quantisation]
    return {**named, "quantise": quantised, "summary": backend.summary, "missing": backend.missing()}


def doctor(as_json: bool = JSON, deep: bool = DEEP) -> None:
    """Check libraries, hardware and backends."""
    from vlexport.tools.doctor import examine

    findings = examine(deep=deep)
    if as_json:
        show_json("doctor", {"findings": findings})
    else:
        show_table(("check", "state", "found", "do"), [each.row() for each in findings])
    broken = [each.name for each in findings if each.state == "broken"]
    with data_is_out():
        if broken:
            raise MisfitError(f"not fit for use: {', '.join(broken)}. See the last column of the table.")


def demo(
    recipe: str = typer.Option(None, metavar="NAME", help="Built-in recipe (default: the demo's own)."),
    backend: str = BACKEND,
    folder: Path = typer.Option(
        Path("demo-output"), metavar="DIR", help="Directory for checkpoint, media and embeddings."
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
        made = run_demo(recipe or default_recipe(), folder, output_dir, backend, progress)
    if as_json:
        show_json("demo", made)
        return
    for line in made.lines():
        show(line)
