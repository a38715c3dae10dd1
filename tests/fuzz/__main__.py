"""Fuzz every target for a time, guided by coverage; what was found is gone on with, and a table ends the run.

Exit status 3 if anything crashed: its bytes lie in the folder of findings, to be named and put into
tests/fuzz/corpus. Needs Atheris (`make fuzz` installs it).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import thirty
from tests.fuzz import targets

FINDINGS = thirty.ROOT / ".fuzz"
_NUMBERS = {
    "executions": r"stat::number_of_executed_units:\s+(\d+)",
    "new": r"stat::new_units_added:\s+(\d+)",
    "edges": r"cov: (\d+)",
}


@dataclass(frozen=True, kw_only=True)
class Fuzzed:
    """Numbers of one target; `new` are inputs that reached something no earlier one had."""

    name: str
    seconds: float
    executions: int
    new: int
    edges: int
    crashes: tuple[Path, ...]


def fuzzed(name: str, seconds: int, seed: int) -> Fuzzed:
    """Run a target in a process of its own until the time is over; behind a crash it is started again."""
    corpus, begun, totals = FINDINGS / name, time.monotonic(), dict.fromkeys(_NUMBERS, 0)
    corpus.mkdir(parents=True, exist_ok=True)
    crashes = FINDINGS / "crashes"
    crashes.mkdir(exist_ok=True)
    before = set(crashes.glob(f"{name}-*"))
    while (left := seconds - (time.monotonic() - begun)) >= 1:
        words = [sys.executable, "-m", "tests.fuzz", "--target", name, f"-max_total_time={int(left)}"]
        words += [
            f"-seed={seed}",
            "-max_len=65536",
            "-rss_limit_mb=2048",
            "-timeout=20",
            "-print_final_stats=1",
        ]
        words += [f"-artifact_prefix={crashes}/{name}-", str(corpus), str(targets.CORPUS / name)]
        done = subprocess.run(
            words, cwd=thirty.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        (FINDINGS / f"{name}.log").write_text(done.stderr[-200_000:], encoding="utf-8")
        for key, pattern in _NUMBERS.items():
            last = [int(each) for each in re.findall(pattern, done.stderr)][-1:] or [0]
            totals[key] = max(totals[key], last[0]) if key == "edges" else totals[key] + last[0]
        if done.returncode == 0:
            break
        seed += 1
        if len(set(crashes.glob(f"{name}-*")) - before) >= 10 or not totals["executions"]:
            break
    found = tuple(sorted(set(crashes.glob(f"{name}-*")) - before))
    return Fuzzed(name=name, seconds=time.monotonic() - begun, crashes=found, **totals)


def run_target(name: str, words: Sequence[str]) -> None:
    """Give this process to libFuzzer."""
    import atheris

    with atheris.instrument_imports(include=["vlexport", "json"]):
        for each in [
            module for module in sys.modules if module.startswith(("vlexport", "tests.fuzz.targets"))
        ]:
            del sys.modules[each]
        from tests.fuzz.targets import call, corpus

        # What is imported at the first call is followed too, and takes none of the time.
        call(name, next(corpus(name)).read_bytes())
    atheris.Setup([sys.argv[0], *words], lambda raw: call(name, raw))
    atheris.Fuzz()


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--seconds", type=int, default=1800, help="wall time of the run (default 1800)")
    options.add_argument("--workers", type=int, default=2, help="processes at a time (default 2)")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", action="append", choices=sorted(targets.TARGETS), metavar="TARGET")
    options.add_argument("--target", choices=sorted(targets.TARGETS), help=argparse.SUPPRESS)
    given, words = options.parse_known_args()
    if given.target:
        run_target(given.target, words)
        return 0
    names = given.only or list(targets.TARGETS)
    share = given.seconds * given.workers // len(names)
    with ThreadPoolExecutor(given.workers) as pool:
        rows = list(pool.map(lambda name: fuzzed(name, share, given.seed), names))
    print("| target | seconds | executions | a second | new inputs | edges | crashes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        speed = row.executions / max(1.0, row.seconds)
        print(
            f"| {row.name} | {row.seconds:.0f} | {row.executions:,} | {speed:,.0f} | {row.new:,} "
            f"| {row.edges:,} | {len(row.crashes)} |"
        )
        if not row.crashes:
            thirty.note(f"fuzzed: {row.name}", row.executions, "python -m tests.fuzz", round(row.seconds, 1))
    for crash in (crash for row in rows for crash in row.crashes):
        print(f"crash: {crash}")
    ran = all(row.executions for row in rows)
    return 0 if ran and not any(row.crashes for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
