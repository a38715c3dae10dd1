"""Verbs of the command line on files of strangers, each case in a process forked from one that is warm."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from PIL import Image

MOST_SECONDS, MOST_BYTES = 20.0, 2 << 30
_MOST_WAITING = 120.0
# Beyond the limit, so that the machine survives a case that is over it.
_ADDRESS_SPACE = 6 << 30
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.strangers.warm"])


@dataclass(kw_only=True)
class Outcome:
    """What each verb returned, how long the longest took, and the most memory that the process had."""

    codes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    memory: int = 0
    said: str = ""

    def faults(self) -> list[str]:
        """Return what no file of a stranger may cause."""
        found = [f"{verb}: exit {code}" for verb, code in self.codes.items() if code not in _EXPECTED]
        if self.seconds > MOST_SECONDS:
            found.append(f"{self.seconds:.1f} s")
        if self.memory > MOST_BYTES:
            found.append(f"{self.memory / 2**30:.2f} GiB")
        return found


_EXPECTED = (0, 2, 3, 4, 5, 6, 7)


def outcome(verbs: Sequence[Sequence[object]], log: Path) -> Outcome:
    """Run verbs one after the other in a process of their own; a killed one has its signal below zero."""
    ours, theirs = _SERVER.Pipe(duplex=False)
    words = [[str(word) for word in verb] for verb in verbs]
    process = _SERVER.Process(target=_run, args=(words, str(log), theirs))
    process.start()
    theirs.close()
    found = Outcome()
    for verb in words:
        # Time of the processor is what counts; a machine may be busy. The first one waits for the server.
        if not ours.poll(_MOST_WAITING if found.codes else 3 * _MOST_WAITING):
            process.kill()
        try:
            code, seconds, memory = ours.recv()
        except EOFError:
            process.join()
            code, seconds, memory = process.exitcode, found.seconds, found.memory
        name = f"{len(found.codes)} {verb[0]}"
        found.codes[name] = code
        found.seconds, found.memory = max(found.seconds, seconds), memory
        if process.exitcode is not None:
            break
    process.join()
    found.said = log.read_text(encoding="utf-8", errors="replace")
    return found


def _run(verbs: list[list[str]], log: str, answers: Connection) -> None:
    from vlexport.cli import run

    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    for words in verbs:
        begun = time.process_time()
        code = run(words)
        sys.stdout.flush()
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answers.send((code, time.process_time() - begun, memory))
    os._exit(0)


def write_image(path: Path) -> Path:
    """Write a small picture of noise."""
    pixels = np.random.default_rng(1).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path
