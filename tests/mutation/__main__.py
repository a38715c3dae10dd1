"""Plant every bug, judge each, print the table; exit status 3 if the gate is too weak or cries wolf."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.mutation.bugs import all_bugs, find_bug
from tests.mutation.runner import as_markdown, is_strong_enough, judged, right_library
from tests.thirty import note


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    options.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this bug; may be repeated"
    )
    options.add_argument("--every", type=int, default=1, metavar="N", help="each Nth bug of the catalogue")
    options.add_argument("--workers", type=int, default=2, help="processes that judge at a time (default 2)")
    options.add_argument("--write", type=Path, metavar="FILE", help="write the table to this page too")
    options.add_argument("--log", type=Path, metavar="FILE", help="keep judgements here; go on where it ends")
    given = options.parse_args()
    bugs = tuple(map(find_bug, given.only)) or all_bugs()[:: given.every]
    begun = time.monotonic()
    outcomes = judged(bugs, workers=given.workers, report=_report, log=given.log)
    right = right_library(outcomes)
    alarms = [each for each in judged(right, workers=given.workers, report=_report) if each.faults]
    page = as_markdown(outcomes)
    sys.stdout.write(page)
    for alarm in alarms:
        sys.stdout.write(f"\nFalse alarm, {alarm.bug.name}: {alarm.judge} {dict(alarm.faults)}\n")
    for outcome in outcomes if given.only else []:
        sys.stdout.write(f"\n{outcome.bug.name}: {outcome.judge} {dict(outcome.faults)}\n")
    if not given.only:
        note("planted bugs", len(outcomes), "python -m tests.mutation", time.monotonic() - begun)
    if given.write:
        given.write.write_text(page, encoding="utf-8")
    return 0 if is_strong_enough(outcomes) and not alarms else 3


def _report(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
