"""Raw samples of a run: cells that are stored one by one and taken up again.

The file is JSON of schema 2; `docs/results/benchmarks.md` explains it field by field.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.tables import write_whole
from vlexport.errors import RequestError

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contender in one cell. Bytes and seconds are as measured, one value per round.

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
    base_bytes: list[float] = field(default_factory=list)
    peak_bytes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def growth_bytes(self) -> float | None:
        """Bytes that a run took on top of what was held before it; none where that drowns in noise."""
        both = list(zip(self.base_bytes, self.peak_bytes, strict=True))
        grown = statistics.median(peak - base for base, peak in both) if both else 0
        return grown if grown > 0 and min(self.base_bytes) > 0 else None


@dataclass(frozen=True, kw_only=True)
class Round:
    """The order in which contenders ran, the twins' samples, and what else went on.

    twins  seconds of an original and of its twin right after or before it
    """

    order: list[str]
    twins: list[list[float]] = field(default_factory=list)
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


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A question at one rate of pruning; `rounds` hold the seconds of each stage of its answers."""

    rate: float
    prompt_tokens: int
    visual_tokens: int
    rounds: list[dict[str, float]]

    def column(self, *stages: str) -> list[float]:
        """Return the seconds of these stages together, round by round."""
        return [sum(each[stage] for stage in stages) for each in self.rounds]


@dataclass(frozen=True, kw_only=True)
class QuestionCell:
    """A question at every rate, no pruning first."""

    question: str
    frames: int
    side: int
    new_tokens: int
    answers: list[Answered]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run: its plan, the machine and the sources that it belongs to, its cells and its questions."""

    plan: Mapping[str, object]
    key: str
    machine: Mapping[str, object]
    cells: dict[str, Cell]
    questions: dict[str, QuestionCell] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {"schema": SCHEMA, **asdict(self)}

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")


def read_result(path: Path) -> Result:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        schema = found.pop("schema")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{path}: not a benchmark result ({error}). Measure again with --fresh."
        ) from error
    if schema != SCHEMA:
        raise RequestError(f"{path}: schema {schema} given, {SCHEMA} expected. Measure again with --fresh.")
    for cell in found["cells"].values():
        cell["rounds"] = [Round(**each) for each in cell["rounds"]]
        cell["entries"] = {name: Entry(**each) for name, each in cell["entries"].items()}
    for question in found["questions"].values():
        question["answers"] = [Answered(**each) for each in question["answers"]]
    found["cells"] = {name: Cell(**each) for name, each in found["cells"].items()}
    found["questions"] = {name: QuestionCell(**each) for name, each in found["questions"].items()}
    return Result(**found)
