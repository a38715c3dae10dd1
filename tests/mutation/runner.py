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
from typing import Any

from benchmarks.sources import source_digest
from tests.mutation.bugs import LANES, NEVER_SURVIVE, RECIPE, Bug, no_bug, plant
from tests.mutation.judge import LEVELS, judge
from tests.mutation.trials import recipe_of, write_trial
from vlexport.recipe import recipe_folder

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "vlexport"
REFERENCE, BROKEN = "reference", "broken"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "300",
    # Tests of seconds judge too.
    "PYTEST_ADDOPTS": "-m 'not slow and not full and not gpu'",
}
# What judgements load besides the classes of one family.
LIBRARIES = (
    "torch.export", "torch._inductor", "pytest", "numpy", "PIL.Image", "jinja2", "tokenizers",
    "typer", "onnxruntime", "onnx", "onnxscript", "openvino",
)  # fmt: skip
# Bundles of these tests have every compiled graph.
COMPILES = "runtime/test_sampling.py"
# Where the tests of a part of the library are, to run these first; all of tests/reference follow.
TESTS_OF = {
    "vision/preprocess.py": ("reference/test_settings.py", "vision/test_preprocess.py"),
    "vision/features/pixels.py": ("recipes/test_generic.py",),
    "checkpoint/adapter.py": ("test_adapters.py",),
    "checkpoint/quantized.py": ("test_quantised.py",),
    "checkpoint/config.py": ("reference/test_settings.py",),
    "vision/slices.py": ("reference/test_slices.py",),
    "vision/": ("reference/test_tables.py", "reference/test_large_calls.py"),
    "./recipe.py": ("reference/test_kimi_vl.py", "reference/test_decoders.py"),
    RECIPE: tuple(
        f"reference/test_{each}.py" for each in ("tables", "slices", "facts", "settings", "prompts")
    ),
    "pruning/": ("pruning/test_evs.py", "reference/test_pruning.py"),
    "positions/": ("reference/test_positions.py", "reference/test_pruning.py"),
    "integrations/vllm/data_parallel.py": ("integrations/test_data_parallel.py",),
    "integrations/": tuple(f"integrations/test_{each}.py" for each in ("pruning", "bundle_tower")),
    "parity/graphs.py": ("parity/test_graphs.py", "runtime/test_forms.py"),
    "parity/": tuple(
        f"parity/test_{each}.py"
        for each in ("graphs", "nets", "tables", "check", "second_look", "shipped", "sharp")
    ),
    "onnx/portable.py": ("onnx/test_portable.py",),
    "onnx/quantize.py": ("onnx/test_integers.py",),
    "backends/onnxruntime.py": ("backends/test_onnxruntime.py",),
    "backends/_tensorrt/backend.py": ("backends/test_tensorrt_runner.py",),
    **dict.fromkeys(("backends/_captured.py", "backends/cudagraphs.py"), ("backends/test_captured.py",)),
    **dict.fromkeys(
        ("_build/build.py", "_build/key.py", "_build/token_graphs.py"), ("runtime/test_forms.py",)
    ),
    "target.py": ("test_target.py",),
    "runtime/prompt": ("reference/test_prompts.py",),
    "runtime/preprocess": ("runtime/test_sliced_answers.py",),
    **dict.fromkeys(("runtime/encoder.py", "runtime/outputs.py"), ("reference/test_levels.py",)),
    **dict.fromkeys(
        ("runtime/embed.py", "runtime/prune.py", "runtime/request.py"),
        ("reference/test_levels.py", "recipes/test_recorded_requests.py"),
    ),
    "runtime/generate": ("reference/test_decoders.py", "runtime/test_sampling.py"),
    "runtime/embedding_cache": ("reference/test_levels.py", "runtime/test_encoder.py"),
    "runtime/": ("reference/test_decoders.py",),
}
LEAST_CAUGHT = 0.98
PAGE = TESTS.parent / "docs" / "results" / "mutants.md"
INTRODUCTION = """\
# Planted bugs

Written by `python -m tests.mutation --write docs/results/mutants.md`. A bug is a small patch of the library's
own sources (`tests/mutation/bugs`). Each line has the bugs that one judge was the first to see: a part of the
gate with the levels that saw it, or else a test, of the part or against another implementation
(`tests/reference`). A judgement ends there, and begins there the next time. `identity`: what a bundle is
called, holds and refuses. L0: exact integers of the calls that are compared. L1: float32 structure. L2: half
precision against its own noise. L3: health and caps. `crash`: the library stumbles.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The first judge that saw a bug, and its faults by level; `broken` is a patch that is no program."""

    bug: Bug
    faults: Mapping[str, str]
    judge: str = ""

    @property
    def caught(self) -> bool:
        return bool(self.faults) and BROKEN not in self.faults


class Log:
    """Judgements on disk, so that a run that was stopped goes on where it was.

    Other sources begin anew. What was not caught is judged again, as a test may have been added.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._lock = path, Lock()
        self._digest = source_digest(PACKAGE, recipe_folder())

    def known(self, bugs: Sequence[Bug]) -> dict[str, Outcome]:
        """Return outcomes by name; the last line of a run that was killed may be short."""
        if self.path is None or not self.path.exists():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("}}")]
        kept = {each["bug"]: each for each in entries if each["sources"] == self._digest}
        found = [
            Outcome(bug=bug, judge=kept[repr(bug)]["judge"], faults=kept[repr(bug)]["faults"])
            for bug in bugs
            if repr(bug) in kept
        ]
        return {outcome.bug.name: outcome for outcome in found if outcome.caught}

    def add(self, outcome: Outcome) -> None:
        seen = {"judge": outcome.judge, "faults": dict(outcome.faults)}
        entry = {"sources": self._digest, "bug": repr(outcome.bug), **seen}
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

    def judge(self, task: Mapping[str, object]) -> tuple[str, dict[str, str]]:
        """Return the judge that saw a fault, and its faults by level."""
        assert self._process.stdout is not None
        self._send(task)
        for line in self._process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                return answer["judge"], answer["faults"]
        return "", {"crash": f"the judging process ended with status {self._process.wait()}"}

    def _send(self, task: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let it finish."""
        with suppress(BrokenPipeError):
            self._process.communicate()


@dataclass(frozen=True, kw_only=True)
class Court:
    """All judges of a run, the folder that they work in, and who saw each bug the last time."""

    workers: SimpleQueue[Worker]
    folder: Path
    seen_by: Mapping[str, str]

    def outcome(self, place: int, bug: Bug) -> Outcome:
        """Plant one bug and return the first judge that sees it: that of the last time, the gate, tests."""
        copy, recipe = self.folder / f"copy-{place}", recipe_of(bug.trial)
        plant(bug, PACKAGE, recipe_folder(), recipe, copy)
        module = (
            f"recipes/{recipe}.py" if bug.file == RECIPE else bug.file.removeprefix("./") or "__init__.py"
        )
        name = f"vlexport/{module}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        task = {"path": str(copy), "module": name}
        judge, faults = "", dict[str, str]()
        worker = self.workers.get()
        try:
            for step in self._steps(bug):
                if "tests" in step and not (copy / "tests").exists():
                    _complete(copy)
                    kept = Path("cache", "d")
                    shutil.copytree(self.folder / kept, copy / kept, copy_function=os.link)
                judge, faults = worker.judge({**task, **step, "cache": str(copy / "cache")})
                if faults:
                    # A process that ended does not say where.
                    judge = judge or (step.get("tests") or step["lanes"])[0]
                    break
        finally:
            self.workers.put(worker)
        shutil.rmtree(copy)
        return Outcome(bug=bug, faults=faults, judge=judge)

    def _steps(self, bug: Bug) -> Iterator[dict[str, Any]]:
        """Yield tasks, those first that are likely to be the last."""
        near, rest = tests_of(bug)
        known = self.seen_by.get(bug.name, "")
        if known.split("::")[0] in (*near, *rest):
            yield {"tests": [known], "optional": True}
        if bug.lanes:
            recipe = recipe_of(bug.trial)
            lanes = sorted(bug.lanes, key=lambda lane: lane != known)
            yield {"recipe": recipe, "folder": str(self.folder / bug.trial), "lanes": lanes}
        yield from ({"tests": names, "optional": False} for names in (near, rest) if names)


def tests_of(bug: Bug) -> tuple[list[str], list[str]]:
    """Return test files that are near a bug, and the further ones; of the right library none but its own."""
    if not bug.file:
        return [*bug.tests], []
    near = [*bug.tests, *next((TESTS_OF[each] for each in TESTS_OF if bug.file.startswith(each)), ())]
    rest = {f"{REFERENCE}/{path.name}" for path in (TESTS / REFERENCE).glob("test_*.py")}
    return near, sorted(rest - {*near})


def judged(
    bugs: Sequence[Bug], *, workers: int, report: Callable[[str], None], log: Path | None = None
) -> list[Outcome]:
    """Return outcomes in order. What a log holds is taken from it."""
    kept = Log(log)
    known = kept.known(bugs)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        # Recipe files are parsed here: ast.parse of Python 3.11 fails in several threads.
        for trial in {bug.trial: recipe_of(bug.trial) for bug in bugs}:
            write_trial(trial, folder / trial)
        _compile(folder / "cache")
        free = stack.enter_context(_workers(workers, bugs[0], folder))
        court = Court(workers=free, folder=folder, seen_by=seen_by(PAGE))

        def one(place: int, bug: Bug) -> Outcome:
            if bug.name in known:
                return known[bug.name]
            outcome = court.outcome(place, bug)
            kept.add(outcome)
            report(f"{bug.name}: {', '.join((outcome.judge, *outcome.faults)) or 'nothing seen'}")
            return outcome

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, range(len(bugs)), bugs))


def right_library(outcomes: Sequence[Outcome]) -> list[Bug]:
    """Return the right library for each judge that saw a bug: what it sees there is a false alarm."""
    seen = [each for each in outcomes if each.caught]
    lanes: dict[str, list[str]] = {}
    for each in seen:
        if each.judge in LANES:
            lanes.setdefault(each.bug.trial, []).append(each.judge)
    files = dict.fromkeys(each.judge.split("::")[0] for each in seen if each.judge not in LANES)
    return [
        *(no_bug(trial, found) for trial, found in lanes.items()),
        *(Bug(name=f"no bug, {file}", tests=(file,)) for file in files),
    ]


def _complete(copy: Path) -> None:
    """Put what tests read beside a copy of the library."""
    root = TESTS.parent
    shutil.copytree(TESTS, copy / "tests", ignore=shutil.ignore_patterns("golden"))
    (copy / "tests" / "golden").symlink_to(TESTS / "golden")
    (copy / "recipes").symlink_to(copy / "vlexport" / "recipes")
    for name in ("benchmarks", "docs", "examples", "pyproject.toml", "README.md"):
        (copy / name).symlink_to(root / name)


def _compile(cache: Path) -> None:
    """Compile the graphs of bundles once: a copy whose bug lies elsewhere takes them from its cache."""
    words = [sys.executable, "-m", "pytest", "-q", str(TESTS / COMPILES)]
    subprocess.run(words, cwd=TESTS.parent, env=ENVIRONMENT, capture_output=True, check=True)
    shutil.copytree(TESTS.parent / ".pytest_cache" / "d", cache / "d")


@contextmanager
def _workers(count: int, first: Bug, folder: Path) -> Iterator[SimpleQueue[Worker]]:
    """Start processes that have loaded what a judgement loads: a fresh import costs more than that itself."""
    judge(recipe_of(first.trial), folder / first.trial, ("eager",))
    loaded = [name for name in sorted(sys.modules) if name.startswith(("transformers.", "safetensors."))]
    free: SimpleQueue[Worker] = SimpleQueue()
    found = [Worker([*LIBRARIES, *loaded]) for _ in range(count)]
    for worker in found:
        free.put(worker)
    try:
        yield free
    finally:
        for worker in found:
            worker.close()


def seen_by(page: Path) -> dict[str, str]:
    """Return who saw each bug the last time, from the table; tests that are gone saw none."""
    rows = re.findall(r"^\* `(.+)`.*?: (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {bug: judge for judge, bugs in rows if _is_there(judge) for bug in bugs.split("; ")}


def _is_there(judge: str) -> bool:
    file, _, test = judge.partition("::")
    path = TESTS / file
    return not test or (
        path.is_file() and f"def {test.partition('[')[0]}(" in path.read_text(encoding="utf-8")
    )


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the page: who saw each bug first, how many each saw, and the survivors."""
    bugs: dict[str, list[str]] = {}
    for each in outcomes:
        if each.caught:
            levels = "" if [*each.faults] == ["tests"] else f" {' '.join(each.faults)}"
            bugs.setdefault(f"`{each.judge}`{levels}", []).append(each.bug.name)
    lines = [f"* {judge}: {'; '.join(names)}" for judge, names in bugs.items()]
    return "\n".join([INTRODUCTION, *lines, "", *_rates(outcomes), "", *_survivors(outcomes), ""])


def _rates(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield how many bugs were caught, and how many each level saw before any other judge."""
    bugs = [each for each in outcomes if not each.bug.harmless]
    caught = sum(each.caught for each in bugs)
    yield f"{caught} of {len(bugs)} caught ({caught / len(bugs):.1%}). Seen first by:"
    for level in LEVELS:
        seen = sum(level in each.faults for each in bugs)
        yield f"* {level}: {seen} ({seen / len(bugs):.0%})"


def _survivors(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield bugs that nothing saw, patches that change no result, and patches that are no program."""
    lost = [each for each in outcomes if not each.caught]
    yield "Survivors:" if lost else "No survivors."
    for each in lost:
        broken = f"broken, mend the patch: {each.faults[BROKEN]}" if BROKEN in each.faults else "not seen"
        yield f"* {each.bug.name} ({each.bug.kind}): {each.bug.harmless or broken}"


def is_strong_enough(outcomes: Sequence[Outcome]) -> bool:
    """Return whether 98 % are caught, and none that survives is broken or of a kind that must not."""
    bugs = [each for each in outcomes if not each.bug.harmless]
    lost = [each for each in bugs if not each.caught]
    bad = any(each.faults or each.bug.kind in NEVER_SURVIVE for each in lost)
    return len(lost) <= (1 - LEAST_CAUGHT) * len(bugs) and not bad
