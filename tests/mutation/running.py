"""Judges many planted bugs, some at a time: by the gate, and what that lets pass by tests/reference."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.catalogue import judged_lanes
from tests.mutation.judge import Trial, judge
from tests.mutation.log import Log
from tests.mutation.mutant import Mutant, plant
from tests.mutation.trials import write_trial
from vlexport.bundle import source_digest
from vlexport.recipe import recipe_folder

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "vlexport"
WORKER = Path(__file__).with_name("worker.py")
REFERENCE = "reference"
# The second judge needs 22 s of one core; a patch may well loop for ever.
SECONDS = 600


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

    def __init__(self, libraries: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._send(list(libraries))

    def judge(self, path: Path, trial: Trial, parts: Sequence[str]) -> dict[str, str]:
        """Faults by level of the copy at `path`."""
        assert self._process.stdout is not None
        task = {"path": str(path), "trial": asdict(trial), "lanes": list(parts)}
        self._send(task)
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, str] = json.loads(line)
                return found
        raise BrokenPipeError(f"status {self._process.wait()}")

    def _send(self, task: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task, default=str) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let it finish."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def judged(
    mutants: Sequence[Mutant],
    *,
    workers: int,
    tell: Callable[[str], None],
    log: Path | None = None,
) -> list[Outcome]:
    """Outcomes in order. What a log holds is taken from it."""
    kept = Log.of(log, source_digest(PACKAGE, recipe_folder()))
    known = kept.known()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        names = dict.fromkeys(mutant.trial for mutant in mutants)
        trials = {name: write_trial(name, folder / name) for name in names}
        libraries = _libraries(trials.values())
        free = stack.enter_context(_workers(workers, libraries))

        def one(place: int, mutant: Mutant) -> Outcome:
            if mutant.name in known:
                return Outcome(mutant=mutant, faults=known[mutant.name])
            copy, trial = folder / f"copy-{place}", trials[mutant.trial]
            plant([mutant] if mutant.planted else [], PACKAGE, recipe_folder(), trial.recipe, copy)
            worker = free.get()
            try:
                faults = worker.judge(copy, trial, judged_lanes(mutant))
            except OSError as error:
                faults = {"crash": f"the judging process ended: {error}"}
                worker = _Worker(libraries)
            finally:
                free.put(worker)
            # What they say of the library as it is does not depend on the trial: once is enough.
            if not faults and (mutant.planted or place == 0):
                faults = reference_faults(copy)
            shutil.rmtree(copy)
            kept.add(mutant.name, faults)
            tell(f"{mutant.name}: {', '.join(faults) or 'nothing seen'}")
            return Outcome(mutant=mutant, faults=faults)

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, range(len(mutants)), mutants))


def reference_faults(copy: Path) -> dict[str, str]:
    """Run the second judge, the tests against implementations of others, on the copy at this path."""
    ignored = shutil.ignore_patterns("__pycache__", "golden")
    shutil.copytree(TESTS, copy / "tests", ignore=ignored)
    (copy / "tests" / "golden").symlink_to(TESTS / "golden")
    shutil.copy(TESTS.parent / "pyproject.toml", copy)
    # The copy is where it runs, and what comes first on the path of a module that is run.
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    words = [sys.executable, "-m", "pytest", f"tests/{REFERENCE}", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            words, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {REFERENCE: f"not done after {SECONDS} seconds"}
    if done.returncode == 0:
        return {}
    lines = done.stdout.splitlines()
    told = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {REFERENCE: (told or lines[-1:] or [f"status {done.returncode}"])[0][:200]}


def _libraries(trials: Iterable[Trial]) -> list[str]:
    """Modules that a judgement loads: a fresh import of each costs more than the judgement itself."""
    for trial in trials:
        judge(trial, ("around", "spiky"))
    loaded = [name for name in sorted(sys.modules) if name.startswith(("transformers.", "safetensors."))]
    return ["torch", "torch.export", *loaded]


@contextmanager
def _workers(count: int, libraries: Sequence[str]) -> Iterator[SimpleQueue[_Worker]]:
    found = [_Worker(libraries) for _ in range(count)]
    free: SimpleQueue[_Worker] = SimpleQueue()
    for worker in found:
        free.put(worker)
    try:
        yield free
    finally:
        for worker in found:
            worker.close()
