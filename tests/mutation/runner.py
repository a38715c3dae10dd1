"""Plant bugs, some at a time; judge each by the gate, and what that lets pass by tests/reference."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from tests.mutation.bugs import NEVER_SURVIVE, RECIPE, Bug, plant
from tests.mutation.judge import LEVELS, judge
from tests.mutation.trials import recipe_of, write_trial
from vlexport.bundle import source_digest
from vlexport.recipe import recipe_folder

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "vlexport"
REFERENCE, BROKEN = "reference", "broken"
# The second judge needs 30 s of one core; a patch may well loop for ever.
SECONDS = 600
# pytest cuts the lines of its summary, which name the exception, to the width of the terminal.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "300"}
# Where the tests of a part of the library are, to run these first; all of tests/reference follow.
TESTS_OF = {
    "vision/preprocess.py": ("reference/test_settings.py", "vision/test_preprocess.py"),
    "vision/slices.py": ("reference/test_slices.py",),
    "vision/": ("reference/test_tables.py", "reference/test_large_calls.py"),
    "language.py": ("reference/test_kimi_vl.py",),
    RECIPE: tuple(
        f"reference/test_{each}.py" for each in ("tables", "slices", "facts", "settings", "prompts")
    ),
    "pruning/": ("reference/test_pruning.py", "reference/test_snapped.py"),
    "positions/": ("reference/test_positions.py", "reference/test_pruning.py"),
    "integrations/": ("reference/test_positions.py",),
    "parity/": tuple(
        f"parity/test_{each}.py"
        for each in ("graphs", "promises", "tables", "check", "second_look", "shipped")
    ),
    "onnx/portable.py": ("onnx/test_portable.py",),
    "backends/onnxruntime.py": ("backends/test_onnxruntime.py",),
    "target.py": ("test_target.py",),
    "runtime/prompt": ("reference/test_prompts.py",),
    "runtime/preprocess": ("runtime/test_sliced_answers.py",),
    **dict.fromkeys(
        ("runtime/embed.py", "runtime/prune.py", "runtime/request.py"), ("recipes/test_qwen3_vl.py",)
    ),
    "runtime/generate": ("reference/test_prefill_chunks.py", "runtime/test_sampling.py"),
    "runtime/embedding_cache": ("runtime/test_encoder.py",),
    "runtime/": ("reference/test_decoders.py", "reference/test_prefill_chunks.py"),
}
INVALID = re.compile(r"\b(ImportError|ModuleNotFoundError|NameError|SyntaxError)\b")
LEAST_CAUGHT = 0.97
INTRODUCTION = """\
# Planted bugs

Written by `python -m tests.mutation --write docs/results/mutants.md`. Every line is one small patch of
the library's own sources. `identity`: what a bundle is called, holds and refuses. L0: exact integers of the
calls that are compared. L1: float32 structure. L2: half precision against its own noise. L3: health and caps.
`crash`: the library stumbles. `reference`: tests/reference, which judges what the gate lets pass, because a
bundle's gate judges bundles; the tests of the part come before them.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The first fault that each level saw; `broken` is a patch that is no valid program."""

    bug: Bug
    faults: Mapping[str, str]

    @property
    def caught(self) -> bool:
        return bool(self.faults) and BROKEN not in self.faults


class Log:
    """Judgements on disk, so that a run that was stopped goes on where it was; other sources begin anew."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._lock = path, Lock()
        self._digest = source_digest(PACKAGE, recipe_folder())

    def known(self) -> dict[str, dict[str, str]]:
        """Return faults by name; the last line of a run that was killed may be short."""
        if self.path is None or not self.path.exists():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("}}")]
        return {entry["name"]: entry["faults"] for entry in entries if entry["sources"] == self._digest}

    def add(self, outcome: Outcome) -> None:
        """Append one judgement."""
        entry = {"sources": self._digest, "name": outcome.bug.name, "faults": dict(outcome.faults)}
        if self.path is not None:
            with self._lock, self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


class Worker:
    """One process that judges; answers come in the order of the tasks."""

    def __init__(self, libraries: Sequence[str]) -> None:
        words = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENVIRONMENT,
        )
        self._send(list(libraries))

    def judge(self, task: Mapping[str, object]) -> dict[str, str]:
        """Return the faults by level."""
        assert self._process.stdout is not None
        self._send(task)
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, str] = json.loads(line)
                return found
        raise BrokenPipeError(f"status {self._process.wait()}")

    def _send(self, task: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let it finish."""
        with suppress(BrokenPipeError):
            self._process.communicate()


def judged(
    bugs: Sequence[Bug], *, workers: int, report: Callable[[str], None], log: Path | None = None
) -> list[Outcome]:
    """Return outcomes in order. What a log holds is taken from it."""
    kept = Log(log)
    known = kept.known()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        # Recipe files are parsed here: ast.parse of Python 3.11 fails in several threads.
        recipes = {bug.trial: recipe_of(bug.trial) for bug in bugs}
        for trial in recipes:
            write_trial(trial, folder / trial)
        free = stack.enter_context(_workers(workers, bugs[0], folder))

        def one(place: int, bug: Bug) -> Outcome:
            if bug.name in known:
                return Outcome(bug=bug, faults=known[bug.name])
            copy, recipe = folder / f"copy-{place}", recipes[bug.trial]
            plant(bug, PACKAGE, recipe_folder(), recipe, copy)
            module = f"recipes/{recipe}.py" if bug.file == RECIPE else bug.file or "__init__.py"
            task = {"path": str(copy), "recipe": recipe, "folder": str(folder / bug.trial)}
            task["module"] = (
                f"vlexport/{module}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
            worker = free.get()
            try:
                faults = worker.judge({**task, "lanes": bug.lanes})
            except OSError as error:
                faults = {"crash": f"the judging process ended: {error}"}
            finally:
                free.put(worker)
            # What the reference tests show of the right library does not depend on the trial: once is enough.
            if not faults and (bug.file or place == 0):
                faults = reference_faults(copy, bug.file)
            shutil.rmtree(copy)
            outcome = Outcome(bug=bug, faults=faults)
            kept.add(outcome)
            report(f"{bug.name}: {', '.join(faults) or 'nothing seen'}")
            return outcome

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, range(len(bugs)), bugs))


def reference_faults(copy: Path, file: str) -> dict[str, str]:
    """Run the second judge, the tests against other implementations, on the copy at this path."""
    ignored = shutil.ignore_patterns("__pycache__", "golden")
    shutil.copytree(TESTS, copy / "tests", ignore=ignored)
    (copy / "tests" / "golden").symlink_to(TESTS / "golden")
    (copy / "docs").symlink_to(TESTS.parent / "docs")
    shutil.copy(TESTS.parent / "pyproject.toml", copy)
    near = next((TESTS_OF[each] for each in TESTS_OF if file.startswith(each)), ())
    rest = sorted({f"{REFERENCE}/{path.name}" for path in (TESTS / REFERENCE).glob("test_*.py")} - {*near})
    # The copy is where it runs, and what comes first on the path of a module that is run.
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    words += [f"tests/{name}" for name in (*near, *rest)]
    try:
        done = subprocess.run(
            words, cwd=copy, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {REFERENCE: f"not done after {SECONDS} seconds"}
    if done.returncode == 0:
        return {}
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    fault = (failures or lines[-1:] or [f"status {done.returncode}"])[0][:200]
    return {BROKEN if INVALID.search(fault) else REFERENCE: fault}


@contextmanager
def _workers(count: int, first: Bug, folder: Path) -> Iterator[SimpleQueue[Worker]]:
    """Start processes that have loaded what a judgement loads: a fresh import costs more than that itself."""
    judge(recipe_of(first.trial), folder / first.trial, ("eager",))
    loaded = [name for name in sorted(sys.modules) if name.startswith(("transformers.", "safetensors."))]
    free: SimpleQueue[Worker] = SimpleQueue()
    found = [Worker(["torch", "torch.export", *loaded]) for _ in range(count)]
    for worker in found:
        free.put(worker)
    try:
        yield free
    finally:
        for worker in found:
            worker.close()


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the page: which level saw each bug, the rate of each level, and the survivors."""
    head = ["bug", "kind", *LEVELS]
    cells = [
        [each.bug.name, each.bug.kind, *("x" if level in each.faults else "." for level in LEVELS)]
        for each in outcomes
    ]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]
    return "\n".join([INTRODUCTION, *lines, "", *_rates(outcomes), "", *_survivors(outcomes), ""])


def _rates(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the share of bugs that each level sees by itself, and that all see together."""
    bugs = [each for each in outcomes if not each.bug.harmless]
    caught = sum(each.caught for each in bugs)
    yield f"{caught} of {len(bugs)} caught ({caught / len(bugs):.1%})."
    for level in LEVELS:
        seen = sum(level in each.faults for each in bugs)
        alone = sum(set(each.faults) == {level} for each in bugs)
        yield f"* {level}: {seen} ({seen / len(bugs):.0%}), of these {alone} by no other level"


def _survivors(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield bugs that nothing saw, patches that change no result, and patches that are no program."""
    lost = [each for each in outcomes if not each.caught]
    yield "Survivors:" if lost else "No survivors."
    for each in lost:
        broken = f"broken, mend the patch: {each.faults[BROKEN]}" if BROKEN in each.faults else "not seen"
        yield f"* {each.bug.name} ({each.bug.kind}): {each.bug.harmless or broken}"


def is_strong_enough(outcomes: Sequence[Outcome]) -> bool:
    """Return whether 97 % are caught, and none that survives is broken or of a kind that must not."""
    bugs = [each for each in outcomes if not each.bug.harmless]
    lost = [each for each in bugs if not each.caught]
    bad = any(each.faults or each.bug.kind in NEVER_SURVIVE for each in lost)
    return len(lost) <= (1 - LEAST_CAUGHT) * len(bugs) and not bad
