"""Whole answers, pruned and not: a process of its own builds a bundle, answers, and times stages."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.foreign import quiet
from benchmarks.plans import Plan, Question
from benchmarks.results import Answered, QuestionCell
from benchmarks.towers import write_tower
from benchmarks.turns import in_turn
from vlexport._build.build import build
from vlexport.backends import Options
from vlexport.checkpoint import Checkpoint
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MethodName, Pixels

# Every question must pay for its tower, so nothing is kept between them.
NOTHING_KEPT = RuntimeOptions(encoder=EncoderOptions(cache_bytes=0))
WORDS, FRAMES_PER_SECOND = "What happens here?", 2.0


def measure_all(
    plan: Plan, recipe: str, questions: Sequence[Question], folder: Path, threads: int
) -> list[QuestionCell]:
    """Measure in another process, whose approvals and files go with the folder."""
    here = {"OMP_NUM_THREADS": str(threads), "XDG_DATA_HOME": str(folder / "data"), "HF_HUB_OFFLINE": "1"}
    spawn = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, here), ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_answered, plan, recipe, questions, folder, threads).result()


def _answered(
    plan: Plan, recipe: str, questions: Sequence[Question], folder: Path, threads: int
) -> list[QuestionCell]:
    os.dup2(2, 1)  # what libraries print is no data
    torch.set_num_threads(threads)
    with quiet(), opened(plan, recipe, folder, threads) as pipeline:
        return [measure(pipeline, question, plan.seed) for question in questions]


def opened(
    plan: Plan, recipe: str, folder: Path, threads: int, selector: MethodName | None = None
) -> Pipeline:
    """Build the plan's tower for its backend, and open it with its decoder."""
    place = write_tower(folder / "checkpoint", recipe, plan.size, plan.decoder, plan.seed)
    source, engines = Checkpoint.open(place), folder / "engines"
    bundle = build(source, plan.asked_backend, recipe=recipe, selector=selector, output_dir=engines)
    return load(bundle.path, checkpoint=source, options=Options(threads=threads), runtime=NOTHING_KEPT)


def noise(frames: int, side: int, seed: int = 0) -> Pixels:
    """Return a film of random pixels."""
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (frames, side, side, 3), dtype=torch.uint8, generator=random)
    return Pixels(kind="video", frames=pixels, frames_per_second=FRAMES_PER_SECOND)


def measure(pipeline: Pipeline, question: Question, seed: int) -> QuestionCell:
    """Answer at each rate in turn."""
    film = noise(question.frames, question.side, seed)
    generation = Generation(max_new_tokens=question.new_tokens, ignore_end=True)
    requests = {
        str(rate): Request(prompt=WORDS, videos=[film], prune=rate or None, generation=generation)
        for rate in (0.0, *question.rates)
    }
    calls = {name: partial(pipeline.generate, each) for name, each in requests.items()}
    answers = in_turn(calls, question.rounds, seed)
    return QuestionCell(
        question=question.name,
        frames=question.frames,
        side=question.side,
        new_tokens=question.new_tokens,
        answers=[
            Answered(
                rate=float(name),
                prompt_tokens=len(ran[0].prompt_token_ids),
                visual_tokens=sum(ran[0].kept),
                rounds=[dict(answer.stages) for answer in ran],
            )
            for name, ran in answers.items()
        ],
    )
