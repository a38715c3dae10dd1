"""The cost of pruning: in reads of the embeddings, and beside the tower that made them.

`python -m vlexport.bench.pruning` prints both tables; status 1 when a limit is passed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from vlexport.bench import evs_cost, evs_share
from vlexport.bench.page import write_between
from vlexport.bench.run import describe_machine

BEGIN = "<!-- pruning, written by `python -m vlexport.bench.pruning --page` -->"
END = "<!-- end of pruning -->"


def main(arguments: list[str]) -> int:
    """Measure, print, and store where asked."""
    parser = argparse.ArgumentParser(prog="python -m vlexport.bench.pruning", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="of the comparison with reads")
    parser.add_argument("--tower-rounds", type=int, default=5, help="of the comparison with the tower")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--eager", action="store_true", help="time the uncompiled forms too")
    parser.add_argument("--out", type=Path, help="file for the raw samples")
    parser.add_argument("--page", type=Path, help="Markdown page whose marked part is written anew")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    chosen = evs_cost.selections(with_eager=options.eager)
    embeds_RD = evs_cost.moving_scene(seed=0)
    rows = [
        row for rate in options.rates for row in evs_cost.measure(embeds_RD, rate, chosen, options.rounds)
    ]
    text = evs_cost.table(rows, options.threads)
    shares = evs_share.measure(options.tower_rounds, options.threads)
    text += "\n" + evs_share.table(shares, options.threads)
    sys.stdout.write(text)
    if options.out:
        samples = {"reads": [asdict(row) for row in rows], "towers": [asdict(share) for share in shares]}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"schema": 1, "machine": describe_machine(options.threads), **samples}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.page:
        write_between(options.page, BEGIN, END, text)
    return int(exceeded(rows, shares))


def exceeded(rows: list[evs_cost.Row], shares: list[evs_share.Share]) -> bool:
    """Whether anything costs more than it may."""
    slow = any(row.limit is not None and row.ratio > row.limit for row in rows)
    return slow or any(share.share > evs_share.LIMIT for share in shares)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
