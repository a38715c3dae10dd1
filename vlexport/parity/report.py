"""Results of an accuracy check: rows with metrics, limits and origin; the verdict is computed from them."""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from vlexport.codec import Json, JsonObject, Measure, canonical, decode, encode, freeze_object
from vlexport.errors import InputError

if TYPE_CHECKING:
    from vlexport.bundle import Verdict as StoredVerdict

Verdict = Literal["passed", "failed", "observed", "blocked", "not_run"]
SCHEMA = 1
REQUIRED_LEVELS = ("L0", "L1", "L3")
WIDTH = 110
BAR = 24
SCALE = "1e-8" + "1e-4".rjust(BAR // 2 - 4) + "1".rjust(BAR // 2)
HEAD = ("level", "check", "shapes", "rel L2", "worst token", "limit", "verdict")
COLUMNS = (6, 30, 28, 9, 11, 9, 8)
# The word for a verdict in the summary, and for what a metric is a multiple of.
WORDS = {"not_run": "not run"}
UNITS = {"ratio": " x noise", "token_ratio": " x noise"}
# Why a tower has no blocks to show.
WHOLE = "a class that is traced whole; seen end to end alone"
_INDENTED: dict[str, Any] = {"initial_indent": " " * 7, "subsequent_indent": " " * 7}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison: `limits` are the largest values that pass; `given` is set where nothing is gated."""

    level: str
    check: str
    shapes: str = "-"
    metrics: Mapping[str, Measure] = field(default_factory=dict)
    limits: Mapping[str, Measure] = field(default_factory=dict)
    origin: str = "-"
    note: str = ""
    given: Verdict | None = None

    def __post_init__(self) -> None:
        for name in ("metrics", "limits"):
            values = {key: float(value) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, MappingProxyType(values))
        if self.given == "passed":
            raise InputError("a row passes by its metrics and limits; 'passed' cannot be given.")

    @property
    def verdict(self) -> Verdict:
        """Return passed only if every limited metric is there, finite and within a finite limit."""
        if self.given is not None:
            return self.given
        if not self.limits or not all(math.isfinite(limit) for limit in self.limits.values()):
            return "blocked"
        if not all(name in self.metrics for name in self.limits):
            return "blocked"
        within = (
            math.isfinite(self.metrics[name]) and self.metrics[name] <= limit
            for name, limit in self.limits.items()
        )
        return "passed" if all(within) else "failed"

    @property
    def is_exact(self) -> bool:
        return bool(self.limits) and not any(self.limits.values())

    def share(self) -> tuple[str, float] | None:
        """Return the metric that takes most of its limit, and that share; none where no limit is above 0."""
        shares = {
            name: self.metrics[name] / limit
            for name, limit in self.limits.items()
            if limit > 0 and name in self.metrics
        }
        # NaN is worse than all numbers.
        return max(shares.items(), key=lambda pair: (math.isnan(pair[1]), pair[1]), default=None)

    def exceeded(self) -> dict[str, float]:
        return {
            name: self.metrics[name]
            for name, limit in self.limits.items()
            if name in self.metrics and not self.metrics[name] <= limit
        }

    def told(self) -> str:
        """Return level, check and sample, with each number over its limit or the reason without any."""
        over = [
            f"{name} {value:.2g} of {self.limits[name]:.2g}{UNITS.get(name, '')}"
            for name, value in self.exceeded().items()
        ]
        why = self.note if self.is_exact and self.note else ", ".join(over) or self.note
        return f"{self.level}, {self.check} on '{self.shapes}': {self.verdict}, {why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPoint:
    """One stage: `own` is the error on the reference's input, `drift` after everything before it."""

    stage: str
    own: Measure | None
    drift: Measure | None
    worst_token: Measure | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCurve:
    """All stages in order; `first_bad` is none where every stage is within its limit."""

    shapes: str
    points: tuple[LayerPoint, ...]
    first_bad: str | None
    cause: str

    def table(self) -> str:
        lines = [f"{'stage':<12}{'own error':>11} {'worst token':>12} {'drift':>11} {'ratio':>10}  {SCALE}"]
        before: float | None = None
        for point in self.points:
            ratio = "-" if not before or point.drift is None else f"{point.drift / before:.3g}"
            own, worst, drift = (_shown(value) for value in (point.own, point.worst_token, point.drift))
            mark = "  <- first bad" if point.stage == self.first_bad else ""
            line = (
                f"{point.stage:<12}{own:>11} {worst:>12} {drift:>11} {ratio:>10}  {_bar(point.drift)}{mark}"
            )
            lines.append(line.rstrip())
            before = point.drift
        first_bad = f"{self.first_bad}: {self.cause}" if self.first_bad else "none"
        return "\n".join([*lines, f"first bad stage on '{self.shapes}': {first_bad}"])


def _bar(drift: float | None) -> str:
    """Return a bar with three signs for each power of ten from 1e-8 up to an error as large as the output."""
    if drift is None or drift <= 1e-8:
        return ""
    return "#" * (BAR if math.isnan(drift) else min(BAR, math.ceil(3 * (8 + math.log10(min(drift, 1.0))))))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def exact_row(check: str, faults: Sequence[str], origin: str, *, shapes: str = "-", note: str = "") -> Row:
    """Return a row of L0 that passes if there is no fault; the first one is named."""
    return count_row(check, len(faults), origin, shapes=shapes, note=faults[0][:200] if faults else note)


def count_row(check: str, wrong: int, origin: str, *, shapes: str = "-", note: str = "") -> Row:
    """Return a row of L0 that passes if nothing is wrong."""
    metrics, limits = {"wrong": float(wrong)}, {"wrong": 0.0}
    return Row(
        level="L0", check=check, shapes=shapes, metrics=metrics, limits=limits, origin=origin, note=note
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """All rows of one check; `subject` is the digest of what was checked, where that is known."""

    rows: tuple[Row, ...]
    required: tuple[str, ...] = REQUIRED_LEVELS
    subject: str | None = None
    layers: LayerCurve | None = None

    @property
    def status(self) -> Verdict:
        """Return passed if nothing failed or is blocked and every required level has a row that passed."""
        verdicts = {row.verdict for row in self.rows}
        if "failed" in verdicts:
            return "failed"
        if "blocked" in verdicts:
            return "blocked"
        passed = {row.level for row in self.rows if row.verdict == "passed"}
        if self.required and set(self.required) <= passed:
            return "passed"
        return "observed" if "observed" in verdicts and not passed else "not_run"

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def is_whole(self) -> bool:
        """True if the tower is a class that is traced whole: it has no stages to compare."""
        return any(row.note.endswith(WHOLE) for row in self.rows)

    def attached_to(self, subject: str) -> ParityReport:
        """Return the report as one of this subject; refused if it already belongs to another."""
        if self.subject not in (None, subject):
            raise InputError(
                f"the report belongs to {self.subject}, not to {subject}. Check that bundle itself."
            )
        return replace(self, subject=subject)

    def caught_by(self) -> tuple[str, ...]:
        return tuple(sorted({row.level for row in self._bad()}))

    def to_json(self) -> dict[str, Json]:
        """Return JSON values; numbers that JSON lacks are text, `seal` is a digest over everything else."""
        rows = [{**encode(row), "verdict": row.verdict} for row in self.rows]
        content = {**encode(self), "schema": SCHEMA, "status": self.status, "rows": rows}
        return {**content, "seal": _seal(content)}

    @staticmethod
    def from_json(value: JsonObject) -> ParityReport:
        """Read back what `to_json` wrote; anything altered is an `InputError`."""
        content = dict(freeze_object(value, "report"))
        seal, schema, status = (content.pop(name, None) for name in ("seal", "schema", "status"))
        if schema != SCHEMA:
            raise InputError(f"report: schema {schema} found, {SCHEMA} expected. Check again.")
        if _seal({**content, "schema": schema, "status": status}) != seal:
            raise InputError("report: altered since it was written (the seal does not fit). Check again.")
        rows = content.pop("rows", ())
        report = decode(ParityReport, {**content, "rows": ()}, "report")
        report = replace(report, rows=tuple(map(_row_from_json, rows if isinstance(rows, tuple) else ())))
        if report.status != status:
            raise InputError(f"report: '{status}' stored, its rows give '{report.status}'. Check again.")
        return report

    def table(self) -> str:
        """Return text no wider than `WIDTH`; exact rows that passed share a line, details are in JSON."""
        exact = [row for row in self.rows if row.level == "L0" and row.verdict == "passed"]
        others = [row for row in self.rows if row not in exact]
        merged = ("L0", "integers are exact", f"{len(exact)} checks", "-", "-", "exact", "passed")
        head = [_line(HEAD), *([_line(merged)] if exact else [])]
        return "\n".join([*head, *map(_described, others), self.summary(), *self.conclusion()])

    def brief(self) -> str:
        bad = self._bad()
        rows = [_line(HEAD), *map(_described, bad)] if bad else []
        return "\n".join([*rows, self.summary(), *self.conclusion()])

    def summary(self) -> str:
        """Return one line: rows by kind, the metric nearest to its limit and where that was, the verdict."""
        judged = [row for row in self.rows if row.verdict in ("passed", "failed", "blocked")]
        parts = []
        for kind, is_exact in (("exact", True), ("numeric", False)):
            rows = [row for row in judged if row.is_exact == is_exact]
            passed = sum(row.verdict == "passed" for row in rows)
            parts.append(f"{passed} {kind}" if passed == len(rows) else f"{passed} of {len(rows)} {kind}")
        others = Counter(row.verdict for row in self.rows if row.verdict in ("observed", "not_run"))
        parts += [f"{count} {WORDS.get(verdict, verdict)}" for verdict, count in others.items()]
        return ", ".join([*parts, *self._worst(), self.status])

    def nearest(self) -> tuple[Row, str, float] | None:
        shares = [(row, *share) for row in self.rows if (share := row.share()) is not None]
        return max(shares, key=lambda entry: (math.isnan(entry[2]), entry[2]), default=None)

    def _worst(self) -> list[str]:
        if (nearest := self.nearest()) is None:
            return []
        row, name, _ = nearest
        at = row.metrics.get("worst_at")
        shapes = _cut(row.shapes, COLUMNS[2])
        place = shapes if at is None else f"{shapes}, token {at:g}"
        return [f"worst {row.metrics[name]:.2g} of {row.limits[name]:.2g}{UNITS.get(name, '')} ({place})"]

    def first_bad(self) -> Row | None:
        return next(iter(self._bad()), None)

    def _bad(self) -> list[Row]:
        return [row for row in self.rows if row.verdict in ("failed", "blocked")]

    def conclusion(self) -> list[str]:
        """Return three lines to act on: level, stage and kind of fault; none where nothing failed."""
        bad = self._bad()
        if not bad:
            return []
        first = bad[0]
        curve = self.layers
        shipped = next((row.check for row in bad if row.check.startswith("engine block")), None)
        if curve is not None and curve.first_bad is not None:
            stage, kind = curve.first_bad, curve.cause
        elif shipped is not None:
            stage, kind = shipped, "the stored program differs from its parts: how the backend made it"
        elif curve is not None:
            stage, kind = first.check, "every stage alone agrees: how the whole engine is made or run"
        else:
            stage = first.check
            kind = "exact integers differ" if first.level == "L0" else first.note or "numbers differ"
        return [f"level: {first.told()}"[:WIDTH], f"stage: {stage}"[:WIDTH], f"kind:  {kind}"[:WIDTH]]


def report_in(verdict: StoredVerdict) -> ParityReport | None:
    """Return the report that a bundle's verdict holds; none where no check has run."""
    return ParityReport.from_json(verdict.table) if verdict.table else None


def _seal(content: Mapping[str, Json]) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()


def _line(cells: tuple[str, ...]) -> str:
    return " ".join(
        _cut(cell, width).ljust(width) for cell, width in zip(cells, COLUMNS, strict=True)
    ).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."


def _described(row: Row) -> str:
    notes = [row.note] if row.note else []
    if row.verdict != "passed" and row.limits:
        notes.append(f"limit: {row.origin}")
    wrapped = [line for text in notes for line in textwrap.wrap(text, WIDTH, **_INDENTED)]
    return "\n".join([_line(_cells(row)), *wrapped])


def _cells(row: Row) -> tuple[str, ...]:
    def shown(name: str) -> str:
        return f"{row.metrics[name]:.2e}" if name in row.metrics else "-"

    limit = "exact" if row.limits else "-"
    if "relative_l2" in row.limits:
        limit = f"{row.limits['relative_l2']:.2e}"
    elif "ratio" in row.limits:
        limit = f"{row.limits['ratio']:g} noise"
    metrics = (shown("relative_l2"), shown("worst_token"))
    return (row.level, row.check, row.shapes, *metrics, limit, row.verdict)


def _row_from_json(value: Json) -> Row:
    content = dict(value) if isinstance(value, Mapping) else {}
    verdict = content.pop("verdict", None)
    row = decode(Row, content, "report.rows")
    if row.verdict != verdict:
        raise InputError(
            f"report: '{verdict}' stored in a row, its numbers give '{row.verdict}'. Check again."
        )
    return row
