"""Seconds to the first token of this tree and of an older one, interleaved: two processes that stay open.

`python -m benchmarks.first_token FOLDER --old TREE [--old-python PYTHON]` writes a random checkpoint whose
decoder has the width and vocabulary of Qwen2.5-VL 3B and few of its layers, builds its tower with both trees,
in float32 for `onnxruntime` and in bfloat16 for `--half-tower`, and puts the questions of
`python -m benchmarks` to both, in turn: all in float32, the decoder in bfloat16, all in bfloat16. Nothing is
kept between two questions.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlexport.recipes.demo import qwen2_5_vl as demo
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.first_hour import apart
from benchmarks.options import parser_of, trees
from benchmarks.plans import FULL, Question
from benchmarks.tables import markdown, marks, write_between
from benchmarks.towers import THREE_BILLION
from vlexport.errors import RequestError
from vlexport.evaluate.intervals import paired
from vlexport.target import processor_here

# `busy` is the first token in seconds of processors, which other work on the machine moves less.
STAGES = ("tower", "prefill", "first_token", "busy", "per_token")
SOONER = ("prefill", "first_token", "busy")
# Of tower and decoder; tokens are compared where both are float32.
PRECISIONS = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))
EXACT = "tower float32, decoder float32"
# Both trees run it, so it calls only what both have.
WORKER = """
import json, os, sys, time
folder, checkpoint, threads, half_tower = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no data
import torch, vlexport
from vlexport.backends import Options
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.request import Generation, Request
from vlexport.specs import Pixels
torch.set_num_threads(threads)
backends = {"float32": "onnxruntime", "bfloat16": half_tower}
kept, open_for, decoders, clips = EncoderOptions(cache_bytes=0), {}, {}, {}
for line in sys.stdin:
    job = json.loads(line)
    tower, dtype, frames, side = job["tower"], job["dtype"], job["frames"], job["side"]
    if (tower, dtype) not in open_for:
        options = Options(threads=threads)
        bundle = vlexport.build(checkpoint, backends[tower], dtype=tower, output_dir=folder, options=options)
        runtime = RuntimeOptions(encoder=kept, decoder=DecoderOptions(dtype=dtype))
        decoder = decoders.get(dtype, checkpoint)
        pipeline = vlexport.load(bundle, checkpoint=decoder, options=options, runtime=runtime)
        open_for[tower, dtype], decoders[dtype] = pipeline, pipeline.language
    if frames not in clips:
        random = torch.Generator().manual_seed(0)
        clips[frames] = torch.randint(0, 256, (frames, side, side, 3), dtype=torch.uint8, generator=random)
    clip = Pixels(kind="video", frames=clips[frames], frames_per_second=2.0)
    generation = Generation(max_new_tokens=job["tokens"], ignore_end=True)
    request = Request(prompt="What happens here?", videos=[clip], generation=generation)
    started = time.process_time()
    pieces = open_for[tower, dtype].stream(request)
    next(pieces)
    busy = time.process_time() - started
    for _ in pieces:
        pass
    answer = pieces.require_answer()
    stages = {**answer.stages, "busy": busy}
    numbers = {"stages": stages, "prompt": len(answer.prompt_token_ids)}
    print(json.dumps({**numbers, "tokens": answer.token_ids}), file=out, flush=True)
"""

Answered = dict[str, Any]


class Side:
    """A tree with its interpreter and its bundle, in a process that answers."""

    def __init__(self, name: str, tree: Path, python: str, folder: Path, *words: object) -> None:
        self.name = name
        line = [python, "-c", WORKER, str(folder / name), *map(str, words)]
        # With -c, modules of the working directory come before those of PYTHONPATH.
        self._process = subprocess.Popen(
            line, env=apart(folder / name, PYTHONPATH=str(tree)), cwd=tree,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def answer(self, question: Question, tower: str, dtype: str) -> Answered:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        sizes = {"frames": question.frames, "side": question.side, "tokens": question.new_tokens}
        self._process.stdin.write(json.dumps({"tower": tower, "dtype": dtype, **sizes}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RequestError(f"{self.name}: the process ended with exit code {self._process.wait()}.")
        answered: Answered = json.loads(line)
        return answered

    def close(self) -> None:
        self._process.communicate()


def measured(sides: Sequence[Side], question: Question) -> dict[str, list[Answered]]:
    """Return answers by tree and dtypes; the first of each, which also warms up, is left out."""
    contenders = [(side, tower, dtype) for tower, dtype in PRECISIONS for side in sides]
    found: dict[str, list[Answered]] = {}
    for number in range(question.rounds + 1):
        for side, tower, dtype in contenders[:: -1 if number % 2 else 1]:
            answered = side.answer(question, tower, dtype)
            kept = found.setdefault(f"{side.name}, tower {tower}, decoder {dtype}", [])
            kept += [answered] * (number > 0)
    return found


def text_of(question: Question, found: Mapping[str, Sequence[Answered]]) -> str:
    """Return the table of a question, and whether float32 gives the same tokens in both trees."""

    def seconds(name: str, stage: str) -> list[float]:
        return [each["stages"][stage] for each in found[name]]

    first = next(iter(found))
    rows = [
        (
            name,
            *(f"{statistics.median(seconds(name, stage)):.3f}" for stage in STAGES),
            *(str(paired(seconds(first, stage), seconds(name, stage))) for stage in SOONER),
        )
        for name in found
    ]
    head = ("", "tower", "prefill", "first token", "of processors", "per token")
    exact = {tuple(each["tokens"]) for name in found if name.endswith(EXACT) for each in found[name]}
    equal = "equal" if len(exact) == 1 else "NOT equal"
    about = (
        f"{found[first][0]['prompt']} prompt tokens, {question.new_tokens} of answer, {question.rounds} "
        f"rounds, medians in seconds; tokens of float32 throughout are {equal}."
    )
    sooner = (f"{name}, times as soon" for name in ("prefill", "first token", "of processors"))
    return "\n".join([f"### {question.name.capitalize()}", "", about, "", *markdown((*head, *sooner), rows)])


def write_model(folder: Path, layers: int) -> Path:
    """Write tower and decoder unless they are there: widths of the 3B model, four blocks of its tower."""
    if not (folder / "config.json").exists():
        text = replace(THREE_BILLION.text, layers=layers)
        found = demo.contents(replace(THREE_BILLION, depth=FULL.size.depth, text=text))
        tower = {"fullatt_block_indexes": list(FULL.size.full_blocks)}
        config = {**found.config, "vision_config": {**found.config["vision_config"], **tower}}
        write_checkpoint(folder, replace(found, config=config))
    return folder


def main(arguments: Sequence[str]) -> None:
    taken = {"folder": None, "--old": None, "--old-python": sys.executable, "--threads": 2, "--page": None}
    parser = parser_of("first_token", __doc__, taken)
    parser.add_argument("--half-tower", default="inductor", help="backend of towers in bfloat16")
    parser.add_argument("--layers", type=int, default=4, help="of the decoder")
    parser.add_argument("--rounds", type=int, help="of each question (default: those of the bench)")
    given = parser.parse_args(arguments)
    checkpoint = write_model(given.folder / f"checkpoint-{given.layers}", given.layers)
    sides = [Side(*tree, checkpoint, given.threads, given.half_tower) for tree in trees(given)]
    load = os.getloadavg()[0]
    parts = []
    for question in FULL.questions:
        job = replace(question, rounds=given.rounds or question.rounds)
        parts.append(text_of(job, measured(sides, job)))
        sys.stdout.write(f"{parts[-1]}\n\n")
        sys.stdout.flush()
    for side in sides:
        side.close()
    parts.append(
        f"{given.layers} decoder layers, {given.threads} threads, towers in bfloat16 in {given.half_tower}; "
        f"{processor_here()}; load {load:.1f} before "
        f"and {os.getloadavg()[0]:.1f} after on {os.cpu_count()} processors."
    )
    sys.stdout.write(f"{parts[-1]}\n")
    if given.page:
        write_between(given.page, *marks("measured", "python -m benchmarks.first_token"), "\n\n".join(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
