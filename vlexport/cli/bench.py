"""`bench`: contenders against each other, one at a time in interleaved rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from vlexport.cli.output import phases, say, show, show_json


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    quick: bool = typer.Option(False, "--quick", help="A small tower, in less than two minutes."),
    recipe: str = typer.Option(None, help="A shipped recipe; without it the first with a windowed tower."),
    out: Path = typer.Option(Path("benchmarks"), help="Folder for the raw samples, a JSON file per plan."),
    page: Path = typer.Option(None, help="A Markdown page whose marked part is written anew."),
    only: list[str] = typer.Option([], help="One workload or question of the plan; once for each."),
    threads: int = typer.Option(2, min=1, help="Threads of every contender."),
    minutes: int = typer.Option(None, min=1, help="Time for all; late cells get fewer rounds, 3 at least."),
    fresh: bool = typer.Option(False, "--fresh", help="Measure again what is stored already."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure every backend against transformers and others' exports, and whole answers, pruned and not.

    What is stored is not measured again.
    """
    from vlexport.bench.page import summary, write_into
    from vlexport.bench.plans import FULL, QUICK
    from vlexport.bench.run import Asked, run

    plan = QUICK if quick else FULL
    if minutes is not None:
        plan = replace(plan, seconds=60 * minutes)
    path = out / f"{plan.name}.json"
    asked = Asked(plan=plan, out=path, recipe=recipe or "", threads=threads, fresh=fresh, only=tuple(only))
    with phases("bench") as progress:
        result = run(asked, progress)
    if page is not None:
        write_into(page, result)
    say(f"raw samples: {path}")
    show_json("bench", result.to_json()) if as_json else show(summary(result))
