"""Arguments that several programs take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def _folder(name: str) -> Path:
    path = Path(name).resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


COMMON: Mapping[str, Mapping[str, Any]] = {
    "folder": {"type": _folder},
    "--old": {"type": Path, "required": True, "help": "a checkout of the older commit"},
    "--old-python": {"help": "interpreter with its dependencies"},
    "--backend": {},
    "--depth": {"type": int, "help": "blocks of the tower; few for a trial"},
    "--rounds": {"type": int},
    "--threads": {"type": int},
    "--memory": {"type": float, "help": "GiB that a process may take"},
    "--out": {"type": Path, "help": "file for the raw samples"},
    "--page": {"type": Path, "help": "a Markdown page whose marked part is rewritten"},
}


def parser_of(program: str, about: str | None, taken: Mapping[str, object]) -> argparse.ArgumentParser:
    """Return the parser of a program that takes some of COMMON, with these defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=about)
    for word, default in taken.items():
        parser.add_argument(word, default=default, **COMMON[word])
    return parser


def trees(given: argparse.Namespace) -> tuple[tuple[str, Path, str, Path], ...]:
    """Return name, checkout, interpreter and folder of the older tree and of this one."""
    older = ("before", given.old.resolve(), given.old_python, given.folder)
    return older, ("now", ROOT, sys.executable, given.folder)
