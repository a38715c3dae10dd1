"""Frames at their own rate, a fifth of them hostile, and a question a minute, in one process."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from tests.runtime.made import video
from tests.runtime.test_video_stream import WORDS, hostile_frames
from tests.soak.endurance import OPTIONS, Reading, reading
from vlexport.errors import VlexportError
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.video_stream import VideoStream

# Of all frames; frames a second; at most so many tokens, which is less than two minutes of them.
SHARE, RATE, MOST = 0.2, 2.0, 600


def is_refused(stream: VideoStream, frame: object) -> bool:
    before = stream.counts
    try:
        stream.push(frame)  # type: ignore[arg-type]
    except VlexportError:
        return stream.counts == before
    return False


def endure(pipeline: Pipeline, minutes: int) -> tuple[int, int, list[Reading]]:
    """Return how many frames were refused and taken, and a reading for each minute; answers are compared."""
    clip, hostile, drawn = video(0, frames=128).frames, hostile_frames(), random.Random(0)
    refused, readings, begun = 0, list[Reading](), time.monotonic()
    with pipeline.watch(fps=RATE, max_tokens=MOST, keep="newest") as stream:
        for number in range(int(60 * RATE * minutes)):
            time.sleep(max(0.0, begun + number / RATE - time.monotonic()))
            while drawn.random() < SHARE:
                assert is_refused(stream, drawn.choice(hostile))
                refused += 1
            stream.push(drawn.choice(clip))
            if number % (60 * RATE) == 60 * RATE - 1:
                answer = stream.ask(WORDS, max_new_tokens=8)
                whole = pipeline.generate(WORDS, videos=[stream.encoded], max_new_tokens=8)
                assert answer.token_ids == whole.token_ids
                readings.append(reading())
        return refused, stream.counts.taken, readings


def main(bundle: str, decoder: str, minutes: str) -> None:
    torch.set_num_threads(1)
    with load(Path(bundle), checkpoint=decoder, runtime=OPTIONS) as pipeline:
        refused, taken, found = endure(pipeline, int(minutes))
    json.dump({"refused": refused, "taken": taken, "readings": [asdict(each) for each in found]}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
