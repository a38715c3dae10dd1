"""`python -m vlexport.bench`: the same as `vlexport bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vlexport.bench.page import summary
from vlexport.bench.plans import FULL, QUICK
from vlexport.bench.run import Asked, run


def _silent(phase: str, share: float) -> None:
    """Nobody watches."""


def main() -> None:
    """Parse, measure, write the summary to stdout."""
    parser = argparse.ArgumentParser(prog="python -m vlexport.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small tower, under two minutes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder for the result")
    parser.add_argument("--fresh", action="store_true", help="measure again what is stored")
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    asked = Asked(plan=plan, out=given.out / f"{plan.name}.json", fresh=given.fresh)
    sys.stdout.write(summary(run(asked, _silent)) + "\n")


if __name__ == "__main__":
    main()
