"""What the trained checkpoint shows: accuracy by seed of the training, by precision, and over pruning.

Each part writes a JSON file beside this one; docs/trained.md has the tables between marks.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import vlexport
from benchmarks.run import describe_machine
from benchmarks.tables import markdown, marks, write_between, write_whole
from benchmarks.trained import scenes
from benchmarks.trained.evaluate import evaluate
from benchmarks.trained.task import HELD_OUT_SEED, write_task
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.backends import backend_names, find_backend, runs_here
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.errors import InputError
from vlexport.evaluate.answers import Run, Tally, answer_rows, compare
from vlexport.evaluate.intervals import wilson
from vlexport.evaluate.tasks import questions_of
from vlexport.parity.pixels import reference_of
from vlexport.reports.sweep import Row
from vlexport.specs import MediaItem

HERE = Path(__file__).parent
PAGE, PLOT = Path("docs/trained.md"), Path("docs/pictures/sweep.svg")
DRAWS = 3
COMPILED = "evs,static,static-frames,delta,contrast,predicted"
SELECTORS = (
    "evs", "vidcom2", "divprune", "static", "static-frames", "delta", "before:static", "before:static-frames",
    "before:static+static", "predicted", "contrast", "before:contrast", "resolution", "random", "uniform",
)  # fmt: skip
RATES = (0.5, 0.7, 0.9)
# The caps of bfloat16 and int8 stand at 0.13 and 0.15, with 0.3 for the worst token.
NOISE = (0.05, 0.15, 0.3, 0.6, 1.0, 1.5)
Show = Callable[[str], None]


def accuracy(folders: Sequence[Path], count: int, show: Show) -> dict[str, Any]:
    """Count right answers of transformers with the weights of each seed."""
    found = {}
    for folder in folders:
        curve = (folder / "training" / "curve.jsonl").read_text(encoding="utf-8").splitlines()
        last = json.loads(curve[-1])
        percent = evaluate(folder, count, HELD_OUT_SEED)
        found[folder.name] = {"steps": last["step"], "cpu_s": last["cpu_s"], "percent": percent}
        show(json.dumps(found[folder.name]))
    return found


def precisions(
    folders: Sequence[Path], count: int, show: Show, backends: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Build every precision of every backend here, or of some, and compare answers with the reference's.

    Rows of others are those of the last run, on as many questions.
    """
    names = backends or backend_names()
    last = json.loads((HERE / "precisions.json").read_text(encoding="utf-8")) if backends else {}
    if backends and last["questions"] != count:
        raise InputError(
            f"the last run asked {last['questions']} questions, not {count}. Measure all backends."
        )
    found = [each for each in last.get("result", []) if each["backend"] not in names]
    with tempfile.TemporaryDirectory() as place:
        task = write_task(Path(place) / "task", count, HELD_OUT_SEED)
        checkpoint, engines = Checkpoint.open(folders[0]), Path(place) / "engines"
        for backend in map(find_backend, names):
            for each in backend.capabilities:
                if not runs_here(backend, each.precision):
                    continue
                quantise = each.quantisation.name if each.quantisation else None
                spec = request(
                    checkpoint, backend.name, dtype=each.dtype, quantize=quantise, output_dir=engines
                )
                bundle = build_checkpoint(spec).bundle
                # The check of a refused engine stops before answers, which are what is measured here.
                with vlexport.load(bundle, checkpoint=spec.checkpoint, allow_failed=True) as pipeline:
                    answers = answer_rows(pipeline, spec, questions_of(task))
                rows = [{**encode(row), "verdict": row.verdict} for row in answers]
                about = {"backend": backend.name, "precision": each.spelled, "status": bundle.verdict.status}
                found.append({**about, "rows": rows})
                show(json.dumps(found[-1]))
    return found


def noise(folders: Sequence[Path], count: int, show: Show) -> list[dict[str, Any]]:
    """Add noise of known size to every row of the reference's embeddings, and answer with what comes out."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        questions = questions_of(write_task(Path(place) / "task", count, HELD_OUT_SEED))
        spec = request(Checkpoint.open(folders[0]), backend="eager", output_dir=Path(place) / "engines")
        bundle = build_checkpoint(spec).require_passed()
        reference = reference_of(spec)
        draw = torch.Generator().manual_seed(0)

        def noisy(share: float, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
            rows = reference.run(items)
            drawn = {name: torch.randn(each.shape, generator=draw) for name, each in rows.items()}
            lengths = {name: each.norm(dim=-1, keepdim=True) for name, each in rows.items()}
            return {
                name: each + share * lengths[name] * drawn[name] / drawn[name].norm(dim=-1, keepdim=True)
                for name, each in rows.items()
            }

        sides: dict[str, Run] = {"reference": reference.run}
        sides |= {str(share): functools.partial(noisy, share) for share in NOISE}
        tallies = {name: Tally() for name in sides}
        with vlexport.load(bundle, checkpoint=folders[0]) as pipeline:
            for question in questions:
                compare(pipeline.require_generator(), question, sides, tallies)
    for name, tally in tallies.items():
        kl = torch.cat(tally.kl)
        changed = 100 * tally.same.count(False) / len(tally.same)
        row = {"noise": name, "percent": tally.percent, "kl": float(kl.mean()), "changed": changed}
        found.append(row)
        show(json.dumps(row))
    return found


def pruning(folders: Sequence[Path], count: int, show: Show) -> dict[str, Any]:
    """Sweep over selectors before the tower and after it, with the engine that every machine has."""
    with tempfile.TemporaryDirectory() as place:
        task = write_task(Path(place) / "task", count, HELD_OUT_SEED)
        bundle = vlexport.build(folders[0], output_dir=Path(place) / "engines", selector=COMPILED)
        settings = {"selectors": SELECTORS, "rates": RATES, "seeds": DRAWS, "max_new_tokens": 6}
        found = vlexport.sweep(bundle, checkpoint=folders[0], task=task, **settings)  # type: ignore[arg-type]
    write_whole(PLOT, found.svg())
    for head, rows in found.tables():
        show("\n".join(markdown(head, rows)))
    return {"about": found.about(), "rows": [_shown(row) for row in found.rows]}


def _shown(row: Row) -> dict[str, Any]:
    """Return of a sweep's row what the table of this page shows."""
    categories = {}
    for name in (name for names in scenes.QUESTIONS.values() for name in names):
        scores = row.categories[name]
        assert scores.accuracy is not None
        categories[name] = {"questions": scores.questions, "right": scores.accuracy.value}
    times = {"encode": row.scores.encode, "first_token": row.scores.first_token}
    return {"selector": row.selector, "rate": row.rate, **times, "categories": categories}


def measure(part: str, folders: Sequence[Path], count: int, show: Show, **options: Any) -> None:
    """Measure one part, keep the numbers, and write its tables into the page."""
    measured, table = PARTS[part]
    result = measured(folders, count, show, **options)
    content = {"questions": count, "machine": describe_machine(threads=1), "result": result}
    write_whole(HERE / f"{part}.json", json.dumps(content, indent=1) + "\n")
    write_between(PAGE, *marks(part, f"measure {part}"), "\n".join(["", *table(content), ""]))


def _accuracy_table(content: dict[str, Any]) -> list[str]:
    """Return a row for all questions, for each kind and for each category."""
    columns = {
        f"{name}, {who}": shares
        for name, one in content["result"].items()
        for who, shares in one["percent"].items()
    }
    kinds = scenes.QUESTIONS
    names = ["all", *kinds, *(category for kind in kinds.values() for category in kind)]
    rows = [(each, *(f"{shares[each]:.1f}" for shares in columns.values())) for each in names]
    return markdown(("% right", *columns), rows)


def _precision_table(content: dict[str, Any]) -> list[str]:
    rows = []
    for each in content["result"]:
        notes = {row["check"]: row for row in each["rows"]}
        right, logs, tokens = (notes[name] for name in ("answers right", "log-probabilities", "tokens"))
        engine = (f"`{each['backend']}`", f"`{each['precision']}`", each["status"])
        lost = f"{right['metrics']['points_lost']:+.2f}"
        kl = f"{logs['metrics']['kl']:.1e} of {logs['limits']['kl']:.0e}"
        verdict = right["verdict"] if right["verdict"] != "passed" else logs["verdict"]
        rows.append((*engine, right["note"], lost, kl, tokens["note"], verdict))
    head = (
        "backend", "precision", "L0 to L3", "answers right", "points lost", "mean KL", "answer tokens", "L4",
    )  # fmt: skip
    return markdown(head, rows)


def _noise_table(content: dict[str, Any]) -> list[str]:
    first, *others = content["result"]
    rows = []
    for each in others:
        right, lost = f"{each['percent']:.1f}", f"{first['percent'] - each['percent']:+.1f}"
        rows.append((each["noise"], right, lost, f"{each['kl']:.1e}", f"{each['changed']:.2f}"))
    head = ("relative noise", "answers right %", "points lost", "mean KL", "answer tokens changed %")
    return [f"{content['questions']} questions.", "", *markdown(head, rows)]


def _pruning_table(content: dict[str, Any]) -> list[str]:
    """Return right answers by kind of question; selectors that leave a kind whole answer as without them."""
    found = content["result"]
    head = ("selector", "rate", *(f"{kind} %" for kind in scenes.QUESTIONS), "tower ms", "first token ms")
    rows = []
    for row in found["rows"]:
        right = (_of_kind(row["categories"], names) for names in scenes.QUESTIONS.values())
        times = (f"{1e3 * row[name]:.1f}" for name in ("encode", "first_token"))
        rows.append((row["selector"], f"{row['rate']:g}", *right, *times))
    return [f"{found['about']}.", "", *markdown(head, rows)]


def _of_kind(categories: dict[str, Any], names: Iterable[str]) -> str:
    """Return the share of right answers to all questions of a kind, with its interval."""
    asked = [categories[name] for name in names]
    count = sum(each["questions"] for each in asked)
    right = sum(each["questions"] * each["right"] for each in asked)
    return wilson(right, count).text(100, ".1f")


# How a part is measured, and its tables.
PARTS: dict[str, tuple[Callable[..., Any], Callable[[dict[str, Any]], list[str]]]] = {
    "accuracy": (accuracy, _accuracy_table),
    "precisions": (precisions, _precision_table),
    "noise": (noise, _noise_table),
    "pruning": (pruning, _pruning_table),
}
