"""Judge patched copies one after the other, each in a forked child, so that heavy libraries load once.

Run as a file, so that nothing of the library itself is loaded before the copy is on the path. The first line
lists modules to load, every other is a task: `path` of the copy, `module` that is patched, `recipe`, `folder`
of the trial's checkpoints, `lanes`. The answer to a task is one line: the faults by level.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

# Of processor time; a patch may well loop for ever.
SECONDS = 180
# Right judgements take 1.5; a patch may well need the largest call that a profile allows.
BYTES = 4 * 2**30
ENDED = "the process ended with status"


def main() -> None:
    """Serve until the input ends."""
    importlib.import_module("torch").set_num_threads(1)
    for name in json.loads(sys.stdin.readline()):
        importlib.import_module(name)
    for line in sys.stdin:
        # A machine under load may end a process; a patch that does so does it twice.
        answer = in_child(line)
        if ENDED in answer.get("crash", ""):
            answer = in_child(line)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def in_child(line: str) -> dict[str, str]:
    """Judge one copy in a fork."""
    with tempfile.TemporaryDirectory() as folder:
        answer, errors = Path(folder) / "answer.json", Path(folder) / "errors.txt"
        child = os.fork()
        if child == 0:
            # Whatever is raised must not unwind into what belongs to the parent.
            try:
                with errors.open("wb") as file:
                    os.dup2(file.fileno(), sys.stderr.fileno())
                judged(json.loads(line), Path(folder))
            except BaseException as error:  # noqa: BLE001  reported by the parent
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                sys.stderr.flush()
            finally:
                os._exit(0 if answer.exists() else 1)
        _, status = os.waitpid(child, 0)
        if answer.exists():
            found: dict[str, str] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        last = [*errors.read_text(encoding="utf-8", errors="replace").splitlines(), ""][-2:][0]
        return {"crash": f"{ENDED} {os.waitstatus_to_exitcode(status)}: {last}"[:300]}


def judged(task: dict[str, str], folder: Path) -> None:
    """Write the faults of one copy; a patch that is no valid program is `broken`, not found."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    # The patched copy first; the judge lies in the tree that this file is of.
    sys.path[:0] = [task["path"]]
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    os.environ["XDG_DATA_HOME"] = str(folder / "data")
    try:
        importlib.import_module(task["module"])
        module = importlib.import_module("tests.mutation.judge")
        faults = module.judge(task["recipe"], Path(task["folder"]), task["lanes"])
    except (ImportError, NameError, SyntaxError) as error:
        faults = {"broken": f"{type(error).__name__}: {error}"[:200]}
    beside = folder / "answer.part"
    beside.write_text(json.dumps(faults), encoding="utf-8")
    beside.replace(folder / "answer.json")


if __name__ == "__main__":
    main()
