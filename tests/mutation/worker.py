"""Judge patched copies one after the other, each in a forked child, so that heavy libraries load once.

Run as a file, so that nothing of the library itself is loaded before the copy is on the path. The first line
lists modules to load, every other is a task: `path` of the copy, `module` that is patched, and either
`recipe`, `folder` of the trial's checkpoints and `lanes` for the gate, or `tests` and the `cache` folder of
pytest. The answer to a task is one line: `judge`, which is a lane or a test, and its `faults` by level.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

# Of processor time; a patch may well loop for ever, or wait for ever.
SECONDS = {"lanes": 180, "tests": 600}
LONGEST_WAIT = 1800
# Right judgements take 1.5; a patch may well need the largest call that a profile allows.
BYTES = {"lanes": 4 * 2**30, "tests": 8 * 2**30}
ENDED = "the process ended with status"
# What a test raised itself; the error of a process that it started may name another.
INVALID = re.compile(r"(?:E +)?(ImportError|ModuleNotFoundError|NameError|SyntaxError)\b")
# pytest's for nothing that failed, a test that did, and names that are none (any more).
PASSED, FAILED, NO_TESTS = 0, 1, (4, 5)


def main() -> None:
    """Serve until the input ends."""
    importlib.import_module("torch").set_num_threads(1)
    for name in json.loads(sys.stdin.readline()):
        importlib.import_module(name)
    for line in sys.stdin:
        # A machine under load may end a process; a patch that does so does it twice.
        answer = in_child(line)
        if ENDED in answer["faults"].get("crash", ""):
            answer = in_child(line)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def in_child(line: str) -> dict[str, Any]:
    """Judge one copy in a fork, which takes what it has started along when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        answer, errors = Path(folder) / "answer.json", Path(folder) / "errors.txt"
        child = os.fork()
        if child == 0:
            # Whatever is raised must not unwind into what belongs to the parent.
            try:
                os.setsid()
                with errors.open("wb") as file:
                    os.dup2(file.fileno(), sys.stderr.fileno())
                    os.dup2(file.fileno(), sys.stdout.fileno())
                _answer(json.loads(line), Path(folder))
            except BaseException as error:  # noqa: BLE001  reported by the parent
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                sys.stderr.flush()
            finally:
                os._exit(0 if answer.exists() else 1)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        last = [*errors.read_text(encoding="utf-8", errors="replace").splitlines(), ""][-2:][0]
        fault = f"{ENDED} {os.waitstatus_to_exitcode(status)}: {last}"[:300]
        return {"judge": "", "faults": {"crash": fault}}


def _answer(task: dict[str, Any], folder: Path) -> None:
    """Write the faults of one copy; a patch that is no valid program is `broken`, not found."""
    kind = "tests" if "tests" in task else "lanes"
    signal.setitimer(signal.ITIMER_PROF, SECONDS[kind])
    signal.alarm(LONGEST_WAIT)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES[kind], BYTES[kind]))
    # The patched copy first, in place of the folder of this file.
    sys.path[0] = os.environ["PYTHONPATH"] = task["path"]
    os.environ["XDG_DATA_HOME"] = str(folder / "data")
    os.chdir(task["path"])
    try:
        importlib.import_module(task["module"])
        judge, faults = tested(task) if kind == "tests" else gated(task)
    except (ImportError, NameError, SyntaxError) as error:
        judge, faults = "", {"broken": f"{type(error).__name__}: {error}"[:200]}
    beside = folder / "answer.part"
    beside.write_text(json.dumps({"judge": judge, "faults": faults}), encoding="utf-8")
    beside.replace(folder / "answer.json")


def gated(task: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return what the parts of the gate see, as `judge`."""
    # The judge lies in the tree that this file is of.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    module = importlib.import_module("tests.mutation.judge")
    found: tuple[str, dict[str, str]] = module.judge(task["recipe"], Path(task["folder"]), task["lanes"])
    return found


class First:
    """The first test that failed, as a plugin of pytest."""

    test, fault = "", ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.test:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
            self.test, self.fault = report.nodeid.removeprefix("tests/"), text.strip()


def tested(task: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the first of these tests that fails in the copy; none where they are not there."""
    pytest = importlib.import_module("pytest")
    first = First()
    words = ["-x", "-q", "--tb=short", "-o", f"cache_dir={task['cache']}"]
    # Loaded before pytest looks for them, which is the point.
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([*words, *(f"tests/{name}" for name in task["tests"])], plugins=[first])
    if status == FAILED and first.test:
        lines = first.fault.splitlines()
        fault = next((line for line in lines if INVALID.match(line)), lines[0] if lines else "")[:200]
        return first.test, {"broken" if INVALID.match(fault) else "tests": fault}
    if status in NO_TESTS and task["optional"]:
        return "", {}
    return "", {} if status == PASSED else {"broken": f"pytest ended with status {int(status)}"}


if __name__ == "__main__":
    main()
