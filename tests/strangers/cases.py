"""Verbs of the command line on files of strangers, many cases in one process that is watched."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from PIL import Image

MOST_SECONDS, MOST_BYTES = 20.0, 2 << 30
# Of waiting on a busy machine; what is limited is processor time.
_MOST_WAITING = 240.0
# Beyond the limit, so that the machine survives a case that is over it.
_ADDRESS_SPACE = 6 << 30
_EXPECTED = (0, 2, 3, 4, 5, 6, 7)
# Where a process has died, the next one is forked from one that has the libraries.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch", "transformers", "onnxruntime", "vlexport.cli", "vlexport._build.build"]
)


@dataclass(kw_only=True)
class Outcome:
    """Exit code of each verb, the longest processor time, the most memory, and what was printed."""

    codes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    memory: int = 0
    output: str = ""

    def faults(self) -> list[str]:
        """Return what no file of a stranger may cause."""
        found = [f"{verb}: exit {code}" for verb, code in self.codes.items() if code not in _EXPECTED]
        if self.seconds > MOST_SECONDS:
            found.append(f"{self.seconds:.1f} s")
        if self.memory > MOST_BYTES:
            found.append(f"{self.memory / 2**30:.2f} GiB")
        return found


class Watched:
    """A process that runs cases one after the other; after one that ended it, the next case has a new one."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: BaseProcess | None = None
        self._ours: Connection

    def outcome(self, verbs: Sequence[Sequence[object]]) -> Outcome:
        """Run verbs one after the other; one that ended the process has its signal below zero."""
        if self._process is None:
            self._ours, theirs = _SERVER.Pipe()
            self._process = _SERVER.Process(target=_serve, args=(str(self._log), theirs), daemon=True)
            self._log.touch()
            self._process.start()
            theirs.close()
        found = Outcome()
        for number, verb in enumerate(verbs):
            self._ours.send([str(word) for word in verb])
            if not self._ours.poll(_MOST_WAITING):
                self._process.kill()
            try:
                code, seconds, memory = self._ours.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                assert self._process.exitcode is not None
                code, seconds, memory, self._process = self._process.exitcode or -1, 0.0, 0, None
            found.codes[f"{number} {verb[0]}"] = code
            found.seconds, found.memory = max(found.seconds, seconds), max(found.memory, memory)
            if self._process is None:
                break
        found.output = self._log.read_text(encoding="utf-8", errors="replace")
        self._log.write_bytes(b"")
        return found


def _serve(log: str, requests: Connection) -> None:
    import torch

    from vlexport.cli import run

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    while True:
        try:
            words = requests.recv()
        except EOFError:
            os._exit(0)
        # The highest mark of memory starts anew.
        Path("/proc/self/clear_refs").write_text("5")
        begun = time.process_time()
        code = run(words)
        sys.stdout.flush()
        seconds = time.process_time() - begun
        status = Path("/proc/self/status").read_text()
        kibibytes = int(status.partition("VmHWM:")[2].split()[0])
        requests.send((code, seconds, 1024 * kibibytes))


def write_image(path: Path) -> Path:
    pixels = np.random.default_rng(1).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_frames(path: Path) -> Path:
    np.save(path, np.random.default_rng(2).integers(0, 256, (4, 56, 84, 3), dtype=np.uint8))
    return path
