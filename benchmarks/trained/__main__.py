"""`python -m benchmarks.trained`: train the tiny checkpoint, write and count held-out questions."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.trained.evaluate import evaluate
from benchmarks.trained.task import HELD_OUT_COUNT, HELD_OUT_SEED, write_task
from benchmarks.trained.train import STEPS, Training, train


def main(words: list[str]) -> int:
    """Run one of the three."""
    given = _parser().parse_args(words)
    if given.verb == "train":
        names = ("folder", "seed", "steps", "stop")
        train(Training(**{name: getattr(given, name) for name in names}), _show)
    elif given.verb == "task":
        _show(str(write_task(given.folder, given.count, given.seed)))
    else:
        _show(json.dumps(evaluate(given.folder, given.bundle, given.count, given.seed), indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trained", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    training = verbs.add_parser("train", help="train into FOLDER, or go on with what was begun there")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--steps", type=int, default=STEPS)
    training.add_argument("--stop", type=int, help="leave off after this step; the same command goes on")
    task = verbs.add_parser("task", help="write pictures, videos and task.jsonl for `vlexport sweep --task`")
    counting = verbs.add_parser("evaluate", help="count right answers of the checkpoint in FOLDER")
    counting.add_argument("--bundle", type=Path, help="a bundle of it, which answers them too")
    for verb in (task, counting):
        verb.add_argument("--count", type=int, default=HELD_OUT_COUNT)
        verb.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    for verb in (training, task, counting):
        verb.add_argument("folder", type=Path)
    return parser


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
