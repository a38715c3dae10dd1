"""What a run has found so far: cells of raw samples, stored after each cell and taken up again.

The file is JSON of schema 1; `docs/benchmarks.md` says field by field what it holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlexport.errors import RequestError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contender in one cell. Bytes and seconds are as measured; `seconds` has one value per round.

    status  `timed`, or why not: `skipped` by the plan, `failed` in a library, `wrong` at the numeric gate
    """

    status: str
    reason: str = ""
    kind: str
    dtype: str
    relative_l2: float | None = None
    worst_token: float | None = None
    min_cosine: float | None = None
    build_seconds: float | None = None
    first_seconds: float | None = None
    base_bytes: float | None = None
    peak_bytes: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def growth_bytes(self) -> float | None:
        """What a run took on top of weights and what was held before it; none where that drowns in noise."""
        if not self.base_bytes or not self.peak_bytes or self.peak_bytes <= self.base_bytes:
            return None
        return self.peak_bytes - self.base_bytes


@dataclass(frozen=True, kw_only=True)
class Round:
    """The order in which contenders ran, and what else went on."""

    order: list[str]
    load: float
    stolen_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One workload with all contenders."""

    workload: str
    series: str
    grids: list[list[int]]
    patches: int
    operations: float
    scores: dict[str, list[float]]
    product_operations: float
    rounds: list[Round]
    entries: dict[str, Entry]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Cell:
        """Read back what `asdict` gave."""
        given = dict(found)
        rounds = [Round(**each) for each in given.pop("rounds")]
        entries = {name: Entry(**each) for name, each in given.pop("entries").items()}
        return cls(**given, rounds=rounds, entries=entries)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A question at one rate of pruning; `rounds` hold the seconds of each stage of its answers."""

    rate: float
    prompt_tokens: int
    visual_tokens: int
    rounds: list[dict[str, float]]

    def column(self, stage: str) -> list[float]:
        """Seconds of a stage, round by round."""
        return [each[stage] for each in self.rounds]


@dataclass(frozen=True, kw_only=True)
class QuestionCell:
    """A question at every rate, no pruning first."""

    question: str
    frames: int
    side: int
    new_tokens: int
    answers: list[Answered]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> QuestionCell:
        """Read back what `asdict` gave."""
        given = dict(found)
        return cls(answers=[Answered(**each) for each in given.pop("answers")], **given)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run: its plan, the machine and the sources that it belongs to, its cells and its questions."""

    plan: Mapping[str, object]
    key: str
    machine: Mapping[str, object]
    cells: dict[str, Cell]
    questions: dict[str, QuestionCell] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write beside and rename, so that a killed run leaves the last whole file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        document = {"schema": SCHEMA, **self.to_json()}
        beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)

    def to_json(self) -> dict[str, object]:
        """Everything, as plain data."""
        return {
            "key": self.key,
            "machine": self.machine,
            "plan": self.plan,
            "cells": {name: asdict(cell) for name, cell in self.cells.items()},
            "questions": {name: asdict(cell) for name, cell in self.questions.items()},
        }


def read_result(path: Path) -> Result:
    """A stored run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        schema = found["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path}: not a benchmark result ({error}). Expected JSON that `vlexport bench` wrote."
        ) from error
    if schema != SCHEMA:
        raise RequestError(f"{path}: schema {schema} given, {SCHEMA} expected. Measure again with --fresh.")
    cells = {name: Cell.from_json(cell) for name, cell in found["cells"].items()}
    questions = {
        name: QuestionCell.from_json(question) for name, question in found.get("questions", {}).items()
    }
    return Result(
        plan=found["plan"], key=found["key"], machine=found["machine"], cells=cells, questions=questions
    )
