"""Judges many planted bugs, some at a time, and tells what became of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from vlexport.errors import VlexportError
from vlexport.parity.mutants.judge import Trial
from vlexport.parity.mutants.mutant import Mutant, plant
from vlexport.parity.mutants.trials import write_trial
from vlexport.recipe import recipe_folder

PACKAGE = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The first fault that each level saw."""

    mutant: Mutant
    faults: dict[str, str]

    @property
    def caught(self) -> bool:
        return bool(self.faults)


class _Worker:
    """One process that judges; answers come in the order of the questions."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def judge(self, path: Path, trial: Trial) -> dict[str, str]:
        """Faults by level of the copy at `path`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        task = {"path": str(path), "trial": asdict(trial)}
        self._process.stdin.write(json.dumps(task, default=str) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, str] = json.loads(line)
                return found
        raise VlexportError("a judging process ended. Run one mutant alone to see why.")

    def close(self) -> None:
        """Let it finish."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def judged(
    mutants: Sequence[Mutant | None], recipe: str, *, workers: int, tell: Callable[[str], None]
) -> list[Outcome]:
    """Outcomes in order; `None` stands for the library without a bug."""
    with tempfile.TemporaryDirectory() as name, _workers(workers) as free:
        folder = Path(name)
        trial = write_trial(recipe, folder / "checkpoints")

        def one(place: int, mutant: Mutant | None) -> Outcome:
            copy = folder / f"copy-{place}"
            plant([mutant] if mutant else [], PACKAGE, recipe_folder(), recipe, copy)
            worker = free.get()
            try:
                faults = worker.judge(copy, trial)
            finally:
                free.put(worker)
            shutil.rmtree(copy)
            label = mutant.name if mutant else "no bug"
            tell(f"{label}: {', '.join(faults) or 'nothing seen'}")
            return Outcome(mutant=mutant or NO_BUG, faults=faults)

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, range(len(mutants)), mutants))


NO_BUG = Mutant(name="no bug", kind="none", file="", old="", new="")


@contextmanager
def _workers(count: int) -> Iterator[SimpleQueue[_Worker]]:
    found = [_Worker() for _ in range(count)]
    free: SimpleQueue[_Worker] = SimpleQueue()
    for worker in found:
        free.put(worker)
    try:
        yield free
    finally:
        for worker in found:
            worker.close()
