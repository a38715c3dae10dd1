"""A contender's process: reads requests from stdin, one JSON object a line, and answers each with numbers.

    {"do": "build", "grids": [...]}                    writes the contender's files
    {"do": "take", "grids": [...], "output": PATH}     gets ready, runs twice, keeps the first tokens
    {"do": "sample"}                                   runs once, or short calls several times; the mean
    {"do": "count", "small": [...], "calls": [...]}    operations of each call, counted

An answer is {"error": TEXT} when a library refuses. The process dies with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from vlexport.bench import memory
from vlexport.bench.contenders import Contender
from vlexport.bench.foreign import quiet
from vlexport.bench.models import num_patches, random_items
from vlexport.bench.serving import Job, Served, build_files, job_for, serve
from vlexport.bench.work import count_work
from vlexport.specs import MediaItem

Numbers = dict[str, float]

# A process that wakes up is slow for some milliseconds; short calls are repeated until that does not matter.
LEAST_SAMPLE_S = 0.2
MOST_REPEATS = 20


def main(arguments: Sequence[str]) -> None:
    """Serve requests until stdin ends."""
    answers = _answers_alone()
    _die_with_parent()
    given = json.loads(arguments[0])
    torch.set_num_threads(given["threads"])
    job = job_for(
        Contender(**given["contender"]),
        Path(given["tower"]),
        Path(given["folder"]),
        given["threads"],
        given["gemm"],
    )
    server = _Server(job, given["seed"])
    for line in sys.stdin:
        answers.write(json.dumps(_answer(server, json.loads(line))) + "\n")
        answers.flush()


def _answer(server: _Server, request: Mapping[str, Any]) -> Numbers | dict[str, str]:
    verbs: dict[str, Callable[[Mapping[str, Any]], Numbers]] = {
        "build": server.build,
        "take": server.take,
        "sample": server.sample,
        "count": server.count,
    }
    try:
        with quiet():
            return verbs[request["do"]](request)
    except Exception as error:  # noqa: BLE001  a contender that cannot is a finding, not a failure
        text = " ".join(str(error).split())
        return {"error": f"{type(error).__name__}: {text[:300]}"}


class _Server:
    def __init__(self, job: Job, seed: int) -> None:
        self._job = job
        self._seed = seed
        self._config = job.recipe.read_config(job.checkpoint)
        self._served: Served | None = None
        self._repeats = 1
        self._base = 0

    def build(self, request: Mapping[str, Any]) -> Numbers:
        started = time.perf_counter()
        build_files(self._job, self._items(request["grids"]))
        return {"seconds": time.perf_counter() - started}

    def take(self, request: Mapping[str, Any]) -> Numbers:
        """Twice, because the first run also makes what is made once."""
        from safetensors.torch import save_file

        if self._served is None:
            self._open()
        assert self._served is not None
        self._served.take(self._items(request["grids"]))
        first, tokens = self._timed()
        if request["output"]:
            save_file({"tokens": tokens.float().contiguous()}, request["output"])
        del tokens
        memory.forget_peak()
        # What compiling leaves behind is not needed for a run.
        base = memory.own() if self._job.contender.kind == "compiled" else self._base
        second, _ = self._timed()
        self._repeats = max(1, min(MOST_REPEATS, int(LEAST_SAMPLE_S / second)))
        return {
            "first_seconds": first,
            "second_seconds": second,
            "base": base,
            "peak": memory.own_peak(),
            "most": memory.peak(),
        }

    def _open(self) -> None:
        """Open, and run the smallest call where calls may differ; what is held from then on is growth."""
        self._served = serve(self._job)
        if self._job.contender.kind not in ("exporter", "compiled"):
            mixes = self._job.recipe.shape_sets(self._config).values()
            self._served.take(self._items(min(([grid for _, grid in mix] for mix in mixes), key=num_patches)))
            self._timed()
        memory.forget_peak()
        self._base = memory.own()

    def sample(self, request: Mapping[str, Any]) -> Numbers:
        seconds = [self._timed()[0] for _ in range(self._repeats)]
        return {"seconds": sum(seconds) / len(seconds), "most": memory.peak()}

    def count(self, request: Mapping[str, Any]) -> Numbers:
        work = count_work(self._job.recipe, self._job.checkpoint, self._items(request["small"]))
        recipe, found = self._job.recipe, {}
        for index, grids in enumerate(request["calls"]):
            items = self._items(grids)
            found[f"{index} operations"] = work.of(recipe, self._config, items)
            for kind, (computed, needed) in recipe.attention_work(self._config, items, "runs").items():
                found[f"{index} {kind} computed"] = float(computed)
                found[f"{index} {kind} needed"] = float(needed)
        return found

    def _timed(self) -> tuple[float, Tensor]:
        assert self._served is not None
        with torch.inference_mode():
            started = time.perf_counter()
            tokens = self._served.run()
            return time.perf_counter() - started, tokens

    def _items(self, grids: Sequence[Sequence[int]]) -> list[MediaItem]:
        shapes = [(frames, rows, columns) for frames, rows, columns in grids]
        return random_items(self._job.recipe, self._config, shapes, self._seed)


def _answers_alone() -> TextIO:
    """The real stdout for answers; whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _die_with_parent() -> None:
    """A stopped process reads no end of file, so the kernel ends it when the parent goes."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
