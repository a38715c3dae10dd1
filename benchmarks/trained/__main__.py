"""`python -m benchmarks.trained`: train the tiny checkpoint, write held-out questions, measure with them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.trained import scenes
from benchmarks.trained.measure import PARTS, measure
from benchmarks.trained.task import HELD_OUT_COUNT, HELD_OUT_SEED, SHOWN, write_shown, write_task
from benchmarks.trained.train import STEPS, train


def main(words: list[str]) -> int:
    given = _parser().parse_args(words)
    if given.verb == "train":
        train(given.folder, _show, seed=given.seed, steps=given.steps, stop=given.stop)
    elif given.verb == "task":
        _show(str(write_task(given.folder, given.count, given.seed, given.kinds)))
    elif given.verb == "scene":
        write_shown(given.folder)
    else:
        chosen = {"backends": given.backends.split(",")} if given.backends else {}
        measure(given.part, given.folders, given.count, _show, **chosen)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trained", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    training = verbs.add_parser("train", help="train into FOLDER, or go on with what was begun there")
    training.add_argument("folder", type=Path)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--steps", type=int, default=STEPS)
    training.add_argument("--stop", type=int, help="leave off after this step; the same command goes on")
    task = verbs.add_parser("task", help="write pictures, videos and task.jsonl for `vlexport sweep --task`")
    task.add_argument("folder", type=Path)
    task.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    words = "kinds of scenes, in turn: `image video` gives the questions before there were others"
    task.add_argument(
        "--kinds", nargs="+", choices=scenes.QUESTIONS, default=tuple(scenes.QUESTIONS), help=words
    )
    shown = verbs.add_parser("scene", help="write the picture, the video and the question of `vlexport demo`")
    shown.add_argument("folder", type=Path, nargs="?", default=SHOWN)
    measuring = verbs.add_parser("measure", help="measure a part of docs/trained.md, over several seeds")
    measuring.add_argument("part", choices=sorted(PARTS))
    measuring.add_argument("folders", type=Path, nargs="+")
    words = "of `precisions`: measure these and keep the rows of others"
    measuring.add_argument("--backends", metavar="NAME,...", help=words)
    for verb in (task, measuring):
        verb.add_argument("--count", type=int, default=HELD_OUT_COUNT)
    return parser


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
