"""Many requests through one process, and what the process held after each."""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from vlexport.errors import VlexportError
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request

# Small beside what the requests make, so that entries come and go all the time.
OPTIONS = RuntimeOptions(encoder=EncoderOptions(cache_bytes=256 * 2**10))


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 gives."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = MallocInfo


@dataclass(frozen=True)
class Reading:
    """Resident bytes, bytes that malloc has given out, open descriptors and threads of this process."""

    resident: int
    allocated: int
    descriptors: int
    threads: int


def reading() -> Reading:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    descriptors, threads = (sum(1 for _ in Path(f"/proc/self/{what}").iterdir()) for what in ("fd", "task"))
    info = LIBC.mallinfo2()
    return Reading(resident, info.uordblks + info.hblkhd, descriptors, threads)


def requests(count: int, num_shapes: int, seed: int = 0, *, alike: bool = False) -> list[Request]:
    """Questions over so many sizes of images and videos, pruned and not; the first one has number `seed`.

    Requests of a size differ in kind, frames, rate, chunk and length, or are `alike` in all but pixels.
    """
    drawn = random.Random(seed)
    sides = [28 * side for side in range(2, 10 if num_shapes <= 64 else 17)]
    shapes = sorted({(height, width) for height in sides for width in sides})[:num_shapes]
    made = []
    for number in range(seed, seed + count):
        height, width = shapes[number % len(shapes)]
        if alike:
            drawn = random.Random(number % len(shapes))
        length, chunk = drawn.choice((2, 4, 6)), drawn.choice((None, 16))
        generation = Generation(max_new_tokens=length, prefill_chunk=chunk)
        if drawn.random() < 0.5:
            film = video(number, drawn.choice((4, 6)), height, width)
            rate = drawn.choice((None, 0.5))
            words = prompt(VIDEO, f"question {number:06}")
            made.append(Request(raw_prompt=words, videos=[film], prune=rate, generation=generation))
        else:
            words = prompt(IMAGE, f"question {number:06}")
            pixels = image(number, height, width)
            made.append(Request(raw_prompt=words, images=[pixels], generation=generation))
    return made


def largest(num_shapes: int) -> Request:
    """No request of a run has more patches: an engine may keep what its largest call so far needed."""
    side = 28 * (9 if num_shapes <= 64 else 16)
    return Request(raw_prompt=prompt(VIDEO, "the largest"), videos=[video(0, 6, side, side)])


def endure(pipeline: Pipeline, count: int, num_shapes: int, num_threads: int) -> list[Reading]:
    """Answer a hundred requests at a time; what the process held after each, or with threads after them."""
    readings = []
    assert pipeline.language is not None
    tokenizer = pipeline.language.tokenizer

    def fill_cache() -> None:
        # Each thread keeps the first 10,000 words that it meets, 390 bytes each; a question has a new one.
        tokenizer.encode(" ".join(f"{number:07}" for number in range(10_001)), add_special=False)

    def answer(request: Request) -> None:
        (outcome,) = pipeline.generate_all([request])
        assert not isinstance(outcome, VlexportError), outcome
        if num_threads == 1:
            readings.append(reading())

    fill_cache()
    with ThreadPoolExecutor(num_threads, initializer=fill_cache) as threads:
        # As many at once as there will ever be.
        list(threads.map(answer, [largest(num_shapes)] * num_threads))
        readings.clear()
        for start in range(0, count, 100):
            batch = requests(min(100, count - start), num_shapes, seed=start, alike=num_threads > 1)
            list(threads.map(answer, batch)) if num_threads > 1 else list(map(answer, batch))
            if num_threads > 1:
                readings.append(reading())
    return readings


def slope(values: Sequence[float]) -> float:
    """Growth per request, by least squares."""
    y = torch.tensor(values, dtype=torch.float64)
    x = torch.arange(len(y), dtype=torch.float64) - (len(y) - 1) / 2
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def main(bundle: str, decoder: str, dtype: str, count: str, num_shapes: str, num_threads: str) -> None:
    torch.set_num_threads(1)
    runtime = replace(OPTIONS, decoder=DecoderOptions(dtype=dtype))
    with load(bundle, checkpoint=decoder, runtime=runtime) as pipeline:
        found = endure(pipeline, int(count), int(num_shapes), int(num_threads))
    json.dump([asdict(each) for each in found], sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
