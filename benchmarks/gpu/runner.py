"""Runs steps as child processes and writes results after every row: a cut keeps what was measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.table import table

# Seconds of each step, in the order of a run: 25 minutes in all.
LIMITS = {
    "machine": 70,
    "tests": 180,
    "towers": 240,
    "captures": 150,
    "pruning": 70,
    "decoder": 150,
    "soak": 100,
    "inductor": 190,
    "hf_compiled": 150,
    "bundles": 200,
}
RESULTS, TABLE, LOG = "results.json", "table.md", "log.txt"
MARK, OTHER = "ROW ", "| "


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which steps run, as which command each, for how many seconds, and where their results go."""

    steps: Sequence[str]
    command: Callable[[str], Sequence[str]]
    out: Path
    seconds: float = float(sum(LIMITS.values()))
    about: str = ""
    environment: Mapping[str, str] | None = None


def run(plan: Plan, say: Callable[[str], object]) -> int:
    """Run the steps, each as long as it may; return 1 where any did not end well, after all the others."""
    plan.out.mkdir(parents=True, exist_ok=True)
    content = read(plan.out / RESULTS) if (plan.out / RESULTS).exists() else {"steps": {}}
    content["about"] = plan.about
    ends, failed = time.monotonic() + plan.seconds, []
    for name in plan.steps:
        started = time.monotonic()
        limit = min(LIMITS[name], ends - started)
        step: dict[str, Any] = {"status": "running", "seconds": 0.0, "rows": []}
        content["steps"][name] = step

        def keep(row: object, into: dict[str, Any] = step, began: float = started) -> None:
            into["rows"].append(row)
            into["seconds"] = time.monotonic() - began
            write(plan.out, content)

        write(plan.out, content)
        if limit > 0:
            say(f"{name}: at most {limit:.0f} s")
            step["status"] = _run_child(plan, name, limit, keep)
        else:
            step["status"] = f"not run: the {plan.seconds:.0f} s of the run are over"
        step["seconds"] = time.monotonic() - started
        write(plan.out, content)
        say(f"{name}: {step['status']}, {len(step['rows'])} rows in {step['seconds']:.0f} s")
        failed += [name] if step["status"] != "fine" else []
    say(table(content))
    if failed:
        say(f"did not end well: {', '.join(failed)}; the output of every step is in {plan.out / LOG}")
    return 1 if failed else 0


def _run_child(plan: Plan, name: str, limit: float, keep: Callable[[object], None]) -> str:
    """Run one step, keep its rows as they come, and return its status.

    What libraries print to the standard output is marked in the log, where it stands among the errors.
    """
    is_over = threading.Event()
    environment = {**os.environ, **(plan.environment or {})}
    with (
        (plan.out / LOG).open("a", encoding="utf-8", buffering=1) as log,
        subprocess.Popen(
            [*plan.command(name)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        ) as child,
    ):
        log.write(f"== {name}\n")

        def stop() -> None:
            is_over.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(MARK):
                    keep(json.loads(line.removeprefix(MARK)))
                else:
                    log.write(f"{OTHER}{line}")
            code = child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    if is_over.is_set():
        return f"stopped after {limit:.0f} s"
    return "fine" if code == 0 else f"failed with exit code {code}: {_last_line(plan.out / LOG)}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = (line.strip() for line in reversed(lines) if not line.startswith(OTHER))
    return next((line for line in errors if line), "")[:300]


def write(out: Path, content: Mapping[str, Any]) -> None:
    """Write the results whole or not at all, and the table of what is there."""
    for name, text in ((RESULTS, json.dumps(content, indent=1) + "\n"), (TABLE, table(content))):
        beside = out / f".{name}"
        beside.write_text(text, encoding="utf-8")
        beside.replace(out / name)


def read(path: Path) -> dict[str, Any]:
    """Return the results that a run has written."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def joined(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the steps of several runs as one, later files first where both have a step."""
    found: dict[str, Any] = {"about": "", "steps": {}}
    for path in paths:
        content = read(path)
        found = {"about": content["about"], "steps": {**found["steps"], **content["steps"]}}
    return found
