"""Runs steps as child processes and writes results after every row: a cut keeps what was measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown, write_whole

# Seconds of each step, in the order of a run: 25 minutes in all.
LIMITS = {
    "machine": 30,
    "tests": 180,
    "towers": 240,
    "captures": 130,
    "pruning": 180,
    "decoder": 150,
    "soak": 100,
    "inductor": 190,
    "hf_compiled": 100,
    "bundles": 200,
}
RESULTS, TABLE, LOG = "results.json", "table.md", "log.txt"
MARK, OTHER = "ROW ", "| "

# Columns by step, in this order; those of `tests` are what its rows have.
COLUMNS = {
    "machine": ("name", "p50_ms", "rate"),
    "towers": (
        "name", "tokens", "p50_ms", "p90_ms", "wall_p50_ms", "roofline_ms", "over_roofline", "relative_l2",
        "peak_bytes", "first_s",
    ),
    "captures": (
        "name", "capture_s", "bytes", "replay_ms", "uncaptured_ms", "gain", "p50_ms", "over_roofline",
    ),
    "pruning": ("name", "kept", "evs_us", "positions_us", "both_us", "evs_floor_us"),
    "decoder": (
        "name", "prefill_ms", "prefill_floor_ms", "token_ms", "token_floor_ms", "tokens_per_s",
    ),
    "soak": ("name", "p50_s", "growth", "memory"),
    "bundles": ("name", "parity", "seconds"),
}  # fmt: skip
COLUMNS |= dict.fromkeys(("inductor", "hf_compiled"), COLUMNS["towers"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The steps to run, the command and seconds of each, and the folder of their results."""

    steps: Sequence[str]
    command: Callable[[str], Sequence[str]]
    out: Path
    seconds: float = float(sum(LIMITS.values()))
    about: str = ""
    environment: Mapping[str, str] | None = None


def run(plan: Plan, print_line: Callable[[str], object]) -> int:
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
        write(plan.out, content)
        if limit > 0:
            print_line(f"{name}: at most {limit:.0f} s")
            step["status"] = _run_child(plan, name, limit, content)
        else:
            step["status"] = f"not run: the {plan.seconds:.0f} s of the run are over"
        step["seconds"] = time.monotonic() - started
        write(plan.out, content)
        print_line(f"{name}: {step['status']}, {len(step['rows'])} rows in {step['seconds']:.0f} s")
        failed += [name] if step["status"] != "fine" else []
    print_line(table(content))
    if failed:
        print_line(f"did not end well: {', '.join(failed)}; the output of every step is in {plan.out / LOG}")
    return 1 if failed else 0


def _run_child(plan: Plan, name: str, limit: float, content: Mapping[str, Any]) -> str:
    """Run one step, keep its rows as they come, and return its status.

    What libraries print to the standard output is marked in the log, where it stands among the errors.
    """
    is_over, step, started = threading.Event(), content["steps"][name], time.monotonic()
    child: subprocess.Popen[str] | None = None

    def kill() -> None:
        if child is not None and child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)

    def stop() -> None:
        is_over.set()
        kill()

    timer = threading.Timer(limit, stop)
    with (plan.out / LOG).open("a", encoding="utf-8", buffering=1) as log:
        log.write(f"== {name}\n")
        try:
            with _deferred(signal.SIGTERM):
                child = subprocess.Popen(
                    [*plan.command(name)],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **(plan.environment or {})},
                    start_new_session=True,
                )
            timer.start()
            assert child.stdout is not None
            with child.stdout as lines:
                for line in lines:
                    if not line.startswith(MARK):
                        log.write(f"{OTHER}{line}")
                        continue
                    step["rows"].append(json.loads(line.removeprefix(MARK)))
                    step["seconds"] = time.monotonic() - started
                    write(plan.out, content)
            code = child.wait()
        finally:
            timer.cancel()
            kill()
            if child is not None:
                child.wait()
    if is_over.is_set():
        return f"stopped after {limit:.0f} s"
    return "fine" if code == 0 else f"failed with exit code {code}: {_last_line(plan.out / LOG)}"


@contextmanager
def _deferred(number: int) -> Iterator[None]:
    """Deliver a signal that arrives inside at the end: a process being started is in no variable yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handler = signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(number, handler)
    if arrived:
        signal.raise_signal(number)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = (line.strip() for line in reversed(lines) if not line.startswith(OTHER))
    return next((line for line in errors if line), "")[:300]


def write(out: Path, content: Mapping[str, Any]) -> None:
    """Write the results whole or not at all, and the table of what is there."""
    write_whole(out / RESULTS, json.dumps(content, indent=1) + "\n")
    write_whole(out / TABLE, table(content))


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def joined(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the steps of several runs as one, later files first where both have a step."""
    found: dict[str, Any] = {"about": "", "steps": {}}
    for content in map(read, paths):
        found = {"about": content["about"], "steps": {**found["steps"], **content["steps"]}}
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return all steps as Markdown; what was skipped stands below its table, with the reason."""
    lines = ["# One GPU, step by step", "", results["about"], ""]
    for name, step in results["steps"].items():
        lines += [f"## {name}: {step['status']} ({step['seconds']:.0f} s)", ""]
        rows = [row for row in step["rows"] if not _reason(row)]
        columns = [each for each in COLUMNS.get(name, ("name",)) if any(each in row for row in rows)]
        if name == "tests":
            columns = sorted({key for row in rows for key in row}, key=lambda key: (key != "name", key))
        if rows and columns:
            lines += [*markdown(columns, ([_cell(row.get(key)) for key in columns] for row in rows)), ""]
        reasons = [f"* {row['name']}: {_reason(row)}" for row in step["rows"] if _reason(row)]
        lines += [*reasons, ""] if reasons else []
    return "\n".join(lines).rstrip() + "\n"


def _reason(row: Mapping[str, Any]) -> str:
    """Return why a row holds no measurement, or nothing if it does."""
    found = ((tag, row[tag]) for tag in ("skipped", "failure", "error") if isinstance(row.get(tag), str))
    return next((f"{tag}: {text}" for tag, text in found), "")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
