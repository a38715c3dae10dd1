"""Frames as they come: what a pair takes after a thousand others, and how soon an answer begins.

`python -m benchmarks.streams FOLDER [--page FILE]` builds the tower of the plan `full` (width 1280). A pair
counts from its second frame to the decoder's memory. A question is put in turn to a stream
of 64 frames and to the same frames as one clip, of which nothing is kept.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from functools import partial

import torch

from benchmarks.answers import FRAMES_PER_SECOND, WORDS, noise, opened
from benchmarks.options import parser_of
from benchmarks.plans import FULL
from benchmarks.tables import markdown, marks, publish
from benchmarks.towers import default_recipe
from benchmarks.turns import in_turn, seconds_of
from vlexport.evaluate.intervals import paired
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Generation, Request
from vlexport.runtime.video_stream import VideoStream

PAIRS, PART, SIDE = 1_000, 200, 56
FRAMES, FILM_SIDE, SHARE = 64, 224, 0.2
ONE_TOKEN = Generation(max_new_tokens=1, ignore_end=True)


def pairs(pipeline: Pipeline) -> tuple[str, ...]:
    """Return a line on the last pairs of a long stream, in turn with those of short ones."""
    frames, seconds = noise(16, SIDE).frames, dict[str, list[float]](long=[], short=[])

    def push(stream: VideoStream, number: int) -> float:
        stream.push(frames[2 * number % 16])
        begun = time.perf_counter()
        stream.push(frames[(2 * number + 1) % 16])
        return time.perf_counter() - begun

    with pipeline.watch(fps=FRAMES_PER_SECOND, max_tokens=4_050) as long:
        for number in range(PAIRS - PART):
            push(long, number)
        at = long.counts
        # A short stream begins anew after ten pairs, so both are timed under the same load.
        for first in range(PAIRS - PART, PAIRS, 10):
            with pipeline.watch(fps=FRAMES_PER_SECOND) as short:
                push(short, 0)
                for number in range(first, first + 10):
                    seconds["long"].append(push(long, number))
                    seconds["short"].append(push(short, number))
        rows, prefilled = (
            (getattr(long.counts, name) - getattr(at, name)) / PART for name in ("rows", "prefilled")
        )
    middle = (f"{1000 * statistics.median(seconds[name]):.1f}" for name in ("short", "long"))
    return f"{rows:g}", f"{prefilled:g}", *middle, str(paired(seconds["long"], seconds["short"]))


def first_tokens(pipeline: Pipeline, rounds: int) -> tuple[str, ...]:
    """Return a line on how soon an answer begins, of a stream and of a clip."""
    film = noise(FRAMES, FILM_SIDE)
    asked = Request(prompt=WORDS, generation=ONE_TOKEN)
    with pipeline.watch(fps=FRAMES_PER_SECOND) as stream:
        for frame in film.frames:
            stream.push(frame)
        ask = {
            "stream": partial(stream.ask, asked),
            "clip": partial(pipeline.generate, replace(asked, videos=[film])),
        }
        seconds = in_turn({name: partial(seconds_of, call) for name, call in ask.items()}, rounds)
        prompts = {call().prompt_token_ids for call in ask.values()}
    if len(prompts) > 1:
        raise SystemExit("streams: prompts differ")
    ratio = paired(seconds["stream"], seconds["clip"])
    middle = (f"{statistics.median(seconds[name]):.3f}" for name in ("stream", "clip"))
    verdict = "met" if ratio.median <= SHARE else "missed"
    return f"{len(prompts.pop())}", *middle, str(ratio), verdict


def main() -> None:
    taken = {"folder": None, "--rounds": 5, "--page": None}
    given = parser_of("streams", __doc__, taken).parse_args()
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    with opened(FULL, default_recipe(), given.folder, threads) as pipeline:
        grown, begun = pairs(pipeline), first_tokens(pipeline, given.rounds)
    tower = f"{FULL.asked_backend}, tower of width {FULL.size.width}, depth {FULL.size.depth}, float32"
    about = f"{tower}, {threads} threads, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}."
    head = ("rows", "prefilled", "first pairs, ms", f"pairs up to {PAIRS}, ms", "ratio")
    columns = ("prompt, tokens", "stream, s", "clip, s", "ratio", f"goal of {SHARE}")
    sides = f"{SIDE}x{SIDE}", f"{FILM_SIDE}x{FILM_SIDE}"
    pushed = f"{about} Pairs of frames of {sides[0]}, of streams of ten and of one of {PAIRS}, in turn:"
    asked = f"The first token about {FRAMES} frames of {sides[1]}, {given.rounds} rounds:"
    text = "\n".join((pushed, "", *markdown(head, [grown]), "", asked, "", *markdown(columns, [begun])))
    publish(text + "\n", given.page, *marks("streams", "python -m benchmarks.streams"))


if __name__ == "__main__":
    main()
