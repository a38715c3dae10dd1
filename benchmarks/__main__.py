"""Measure every backend against transformers and others' exports, and whole answers, pruned and not.

Raw samples are stored cell by cell, and what is stored is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.page import BEGIN, END, summary
from benchmarks.plans import FULL, QUICK
from benchmarks.run import RunOptions, run
from benchmarks.tables import write_between
from vlexport.errors import VlexportError


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small tower, in a few minutes")
    parser.add_argument("--recipe", default="", help="default: the first with a windowed tower")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder for the raw samples")
    parser.add_argument("--page", type=Path, help="a Markdown page whose marked part is rewritten")
    parser.add_argument("--only", action="append", default=[], help="a workload or question; repeatable")
    parser.add_argument("--threads", type=int, default=2, help="of every contender")
    parser.add_argument("--minutes", type=int, help="for all rounds; every cell takes 3 at least")
    parser.add_argument("--fresh", action="store_true", help="measure again what is stored")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    plan = QUICK if given.quick else FULL
    if given.minutes is not None:
        plan = replace(plan, seconds=60 * given.minutes)
    same = {name: getattr(given, name) for name in ("recipe", "threads", "fresh")}
    try:
        options = RunOptions(plan=plan, out=given.out / f"{plan.name}.json", only=tuple(given.only), **same)
        result = run(options, _show)
        if given.page is not None:
            write_between(given.page, BEGIN, END, summary(result))
    except VlexportError as error:
        _show(f"benchmarks: {error}")
        return error.exit_code
    sys.stdout.write((json.dumps(result.to_json(), indent=2) if given.json else summary(result)) + "\n")
    return 0


def _show(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
