"""Calls of some cells beside whole ones, and the first token of answers about them; in turn, in one process.

`python -m benchmarks.before_tower FOLDER PAGE... [--page FILE]` builds the tower of the plan `full` (width
1280) for two backends with the rules compiled, and encodes 16 frames of 448x448 and pictures of pages, whole
and by part. A call counts from pixels to rows: preprocessing, choice and tables are in it. What a call should
take is the share of its cells of the whole call's time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.answers import FRAMES_PER_SECOND, WORDS, opened
from benchmarks.options import parser_of
from benchmarks.plans import FULL
from benchmarks.tables import markdown, marks, publish
from benchmarks.towers import default_recipe
from benchmarks.turns import in_turn, seconds_of
from vlexport.evaluate.intervals import paired
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Generation, Request
from vlexport.specs import Pixels

BACKENDS = ("onnxruntime", "openvino")
RULES = "evs,static,contrast,predicted"
# What a kept call may take, in its share of a whole call; how much sooner the first token should be at 0.7.
LIMIT, SOONER = 1.1, 2.5
VIDEO = ("static:0.5", "static:0.7")
PAGES = ("contrast:0.5", "contrast:0.7", "predicted")
ASKED: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "evs 0.7 after the tower": {"prune": 0.7},
    "static 0.7 after the tower": {"prune": 0.7, "method": "static"},
    "static 0.7 before the tower": {"prune_before": "static:0.7"},
}


def film() -> Pixels:
    """Return 16 frames of noise on a noisy ground, a third of whose cells change."""
    draw = torch.Generator().manual_seed(0)
    ground = torch.randint(0, 256, (1, 448, 448, 3), dtype=torch.uint8, generator=draw)
    frames = torch.randint(0, 256, (16, 448, 448, 3), dtype=torch.uint8, generator=draw)
    moves = (torch.rand((16, 16, 16), generator=draw) < 1 / 3).repeat_interleave(28, 1)
    return Pixels(
        kind="video",
        frames=torch.where(moves.repeat_interleave(28, 2)[..., None], frames, ground),
        frames_per_second=FRAMES_PER_SECOND,
    )


def page_of(path: Path) -> Pixels:
    pixels = torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy())
    return Pixels(kind="image", frames=pixels[None])


def calls(pipeline: Pipeline, media: Pixels, rules: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield a line of the table for each rule."""
    rows = {rule: len(pipeline.encode(media, prune_before=rule or None).embeds) for rule in ("", *rules)}
    encode = {rule: partial(pipeline.encode, media, prune_before=rule or None) for rule in rows}
    seconds = in_turn({rule: partial(seconds_of, call) for rule, call in encode.items()}, rounds)
    for rule in rules:
        share = rows[rule] / rows[""]
        ratio = paired(seconds[rule], [share * whole for whole in seconds[""]])
        middle = [statistics.median(seconds[name]) for name in ("", rule)]
        verdict = "met" if ratio.median <= LIMIT else "missed"
        yield rule, f"{share:.3f}", *(f"{value:.2f}" for value in middle), str(ratio), verdict


def answers(pipeline: Pipeline, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield a line for each way to prune a question about the film."""
    asked = Request(prompt=WORDS, videos=[film()], generation=Generation(max_new_tokens=2, ignore_end=True))
    requests = {name: replace(asked, **pruned) for name, pruned in ASKED.items()}
    ran_of = in_turn({name: partial(pipeline.generate, each) for name, each in requests.items()}, rounds)
    stages = {name: [answer.stages for answer in ran] for name, ran in ran_of.items()}
    first = {name: [each["first_token"] for each in ran] for name, ran in stages.items()}
    for name, ran in stages.items():
        steps = (
            statistics.median(each[stage] for each in ran) for stage in ("preprocess", "tower", "prefill")
        )
        sooner = paired(first["whole"], first[name])
        seconds = (f"{value:.2f}" for value in (*steps, statistics.median(first[name])))
        yield name, *seconds, str(sooner)


def main() -> None:
    parser = parser_of("before_tower", __doc__, {"folder": None, "--rounds": 5, "--page": None})
    parser.add_argument("pages", type=Path, nargs="+", help="pictures of pages")
    given = parser.parse_args()
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    media = {"16 frames of 448x448": (film(), VIDEO)}
    media |= {path.stem: (page_of(path), PAGES) for path in given.pages}
    timed, asked = [], []
    for backend in BACKENDS:
        plan = replace(FULL, asked_backend=backend)
        with opened(plan, default_recipe(), given.folder, threads, RULES) as pipeline:
            for name, (pixels, rules) in media.items():
                timed += [(backend, name, *line) for line in calls(pipeline, pixels, rules, given.rounds)]
            asked += [(backend, *line) for line in answers(pipeline, given.rounds)]
    about = (
        f"Tower of width {FULL.size.width}, depth {FULL.size.depth}, float32, {threads} threads, torch "
        f"{torch.__version__}, {given.rounds} interleaved rounds, load {os.getloadavg()[0]:.1f}. A call may "
        f"take {LIMIT} times the share of its cells."
    )
    head = ("backend", "media", "cells", "share", "whole, s", "part, s", "times its share", "goal")
    columns = ("backend", "pruned", "preprocess, s", "tower, s", "prefill, s", "first token, s", "sooner")
    question = f"A question about the film; at 0.7 the first token should come {SOONER} times as soon."
    tables = [about, "", *markdown(head, timed), "", question, "", *markdown(columns, asked)]
    text = "\n".join(tables)
    publish(text + "\n", given.page, *marks("before the tower", "python -m benchmarks.before_tower"))


if __name__ == "__main__":
    main()
