"""Whole answers, pruned and not: a process of its own makes a checkpoint and a bundle, asks, and times.

`python -m vlexport.bench.questions` reads one JSON object from its argument and prints what it measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vlexport.backends import Options
from vlexport.bench.cells import order_of
from vlexport.bench.foreign import quiet
from vlexport.bench.models import DecoderSize, TowerSize, contents_of
from vlexport.bench.plans import Plan, Question
from vlexport.bench.results import Answered, QuestionCell
from vlexport.build import build_checkpoint, request
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.writing import write_checkpoint
from vlexport.errors import VlexportError
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.requests import Generation, Request
from vlexport.runtime.speaking import RuntimeOptions
from vlexport.specs import Pixels

# Every question must pay for its tower, so nothing is kept between them.
NOTHING_KEPT = RuntimeOptions(encoder=EncoderOptions(cache_bytes=0))
WORDS, FRAMES_PER_SECOND = "What happens here?", 2.0


def ask_all(
    plan: Plan, recipe: str, questions: Sequence[Question], folder: Path, threads: int
) -> list[QuestionCell]:
    """Measure in another process, whose approvals and files go with the folder."""
    given = {
        "recipe": recipe,
        "size": asdict(plan.size),
        "decoder": asdict(plan.decoder),
        "backend": plan.asked_backend,
        "questions": [asdict(question) for question in questions],
        "folder": str(folder),
        "threads": threads,
        "seed": plan.seed,
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "XDG_DATA_HOME": str(folder / "data"),
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "vlexport.bench.questions", json.dumps(given)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        tail = " ".join(ran.stderr.strip().splitlines()[-1:])
        raise VlexportError(
            f"questions could not be measured, their process ended with {ran.returncode}: {tail}"
        )
    return [QuestionCell.from_json(found) for found in json.loads(ran.stdout)]


def main(arguments: Sequence[str]) -> None:
    """What the process does: everything is made in the folder, and the cells go to stdout."""
    given = json.loads(arguments[0])
    torch.set_num_threads(given["threads"])
    with quiet(), _pipeline(given) as pipeline:
        cells = [ask(pipeline, Question(**each), given["seed"]) for each in given["questions"]]
    sys.stdout.write(json.dumps([asdict(cell) for cell in cells]))


def _pipeline(given: Mapping[str, Any]) -> Pipeline:
    folder = Path(given["folder"])
    contents = contents_of(given["recipe"], TowerSize(**given["size"]), DecoderSize(**given["decoder"]))
    checkpoint = Checkpoint.open(write_checkpoint(folder / "checkpoint", contents, seed=given["seed"]))
    asked = request(checkpoint, recipe=given["recipe"], backend=given["backend"], into=folder / "engines")
    bundle = build_checkpoint(asked).require_passed()
    options = Options(threads=given["threads"])
    return load(bundle.path, decoder=checkpoint, options=options, runtime=NOTHING_KEPT)


def ask(pipeline: Pipeline, question: Question, seed: int) -> QuestionCell:
    """One warm-up at each rate, then rounds that go through the rates in random order and back."""
    film = _film(question, seed)
    rates = {str(rate): rate for rate in (0.0, *question.rates)}
    answers = {name: pipeline.generate(_request(question, film, rate)) for name, rate in rates.items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in rates}
    for index in range(question.rounds):
        for name in order_of(list(rates), index, seed):
            answer = pipeline.generate(_request(question, film, rates[name]))
            rounds[name].append(dict(answer.stages))
    return QuestionCell(
        question=question.name,
        frames=question.frames,
        side=question.side,
        new_tokens=question.new_tokens,
        answers=[
            Answered(
                rate=rate,
                prompt_tokens=len(answers[name].prompt_token_ids),
                visual_tokens=sum(answers[name].kept),
                rounds=rounds[name],
            )
            for name, rate in rates.items()
        ],
    )


def _request(question: Question, film: Pixels, rate: float) -> Request:
    generation = Generation(max_new_tokens=question.new_tokens, ignore_end=True)
    return Request(prompt=WORDS, videos=[film], prune=rate or None, generation=generation)


def _film(question: Question, seed: int) -> Pixels:
    random = torch.Generator().manual_seed(seed)
    shape = (question.frames, question.side, question.side, 3)
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    return Pixels(kind="video", frames=frames, frames_per_second=FRAMES_PER_SECOND)


if __name__ == "__main__":
    main(sys.argv[1:])
