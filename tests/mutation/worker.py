"""Judges patched copies one after the other, each in a forked child, so heavy libraries load once.

Run as a file, so that nothing of the library itself is loaded before the copy is on the path. Reads a
line with the names of modules to load, then one JSON object a line (`path`: what to put first on the path,
`trial`, `lanes`), and answers each with the faults by level.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from pathlib import Path

# Of processor time; a patch may well loop for ever.
SECONDS = 180
# Right judgements take 1.5; a patch may well ask for the largest call that a profile allows.
BYTES = 4 * 2**30
ENDED = "the process ended with status"


def main() -> None:
    """Serve until the input ends."""
    importlib.import_module("torch").set_num_threads(1)
    for name in json.loads(sys.stdin.readline()):
        importlib.import_module(name)
    for line in sys.stdin:
        # A machine under load may end a process; a patch that does so does it twice.
        answer = _forked(line)
        if ENDED in answer.get("crash", ""):
            answer = _forked(line)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _forked(line: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if child == 0:
            try:
                _child(line, answer)
            finally:
                # Whatever was raised must not unwind into what belongs to the parent.
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if answer.exists():
            found: dict[str, str] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        errors = answer.parent / "errors.txt"
        told = errors.read_text(encoding="utf-8", errors="replace").splitlines() if errors.exists() else []
        last = told[-1] if told else ""
        return {"crash": f"{ENDED} {os.waitstatus_to_exitcode(status)}: {last}"[:300]}


def _child(line: str, answer: Path) -> None:
    """Never returns."""
    with (answer.parent / "errors.txt").open("wb") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    task = json.loads(line)
    # The patched copy first; the judge lies in the tree that this file is of.
    sys.path[:0] = [task["path"]]
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    os.environ["XDG_DATA_HOME"] = str(answer.parent / "data")
    try:
        module = importlib.import_module("tests.mutation.judge")
        trial = {name: Path(value) if name != "recipe" else value for name, value in task["trial"].items()}
        faults = module.judge(module.Trial(**trial), task["lanes"])
    except (ImportError, SyntaxError) as error:
        faults = {"crash": f"{type(error).__name__}: {error}"[:200]}
    beside = answer.with_suffix(".part")
    beside.write_text(json.dumps(faults), encoding="utf-8")
    beside.replace(answer)
    os._exit(0)


if __name__ == "__main__":
    main()
