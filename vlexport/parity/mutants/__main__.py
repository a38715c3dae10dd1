"""Plant every bug, judge each, print the table; exit status 3 if the gate is too weak or cries wolf."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vlexport.parity.mutants.catalogue import MUTANTS, find_mutant
from vlexport.parity.mutants.running import judged
from vlexport.parity.mutants.table import as_markdown, is_strong_enough
from vlexport.parity.mutants.trials import judged_recipe


def main() -> int:
    """Run the program."""
    options = argparse.ArgumentParser(prog="python -m vlexport.parity.mutants", description=__doc__)
    options.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this bug; may be repeated"
    )
    options.add_argument("--recipe", help="the recipe whose line is patched")
    options.add_argument("--workers", type=int, default=2, help="processes that judge at a time (default 2)")
    options.add_argument("--write", type=Path, metavar="FILE", help="write the table to this page too")
    options.add_argument("--log", type=Path, metavar="FILE", help="keep judgements here; go on where it ends")
    given = options.parse_args()
    mutants = tuple(find_mutant(name) for name in given.only) or MUTANTS
    recipe = judged_recipe(given.recipe)
    outcomes = judged([None, *mutants], recipe, workers=given.workers, tell=_tell, log=given.log)
    page = as_markdown(outcomes[1:])
    sys.stdout.write(page)
    if outcomes[0].caught:
        sys.stdout.write(f"\nFalse alarm without any bug: {outcomes[0].faults}\n")
    for outcome in outcomes[1:] if given.only else []:
        sys.stdout.write(f"\n{outcome.mutant.name}: {outcome.faults}\n")
    if given.write:
        given.write.write_text(page, encoding="utf-8")
    return 0 if is_strong_enough(outcomes[1:]) and not outcomes[0].caught else 3


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
