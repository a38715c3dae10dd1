"""Where an engine drifts from the reference: error after every block, the first bad one, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlexport.bundle.strict_json import Fields, Json, JsonObject
from vlexport.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPoint:
    """One stage: `own` is the error on the reference's input, `drift` after everything before it."""

    stage: str
    own: float | None
    drift: float | None
    worst_token: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCurve:
    """All stages in order; `first_bad` is none where every stage is within its limit."""

    shapes: str
    points: tuple[LayerPoint, ...]
    first_bad: str | None
    cause: str

    def table(self) -> str:
        """Plain text: one line per stage with the ratio to the one before."""
        lines = [f"{'stage':<12}{'own error':>11} {'worst token':>12} {'drift':>11} {'ratio':>10}"]
        before: float | None = None
        for point in self.points:
            ratio = "-" if not before or point.drift is None else f"{point.drift / before:.3g}"
            own, worst, drift = (_shown(value) for value in (point.own, point.worst_token, point.drift))
            mark = "  <- first bad" if point.stage == self.first_bad else ""
            lines.append(f"{point.stage:<12}{own:>11} {worst:>12} {drift:>11} {ratio:>10}{mark}")
            before = point.drift
        found = f"{self.first_bad}: {self.cause}" if self.first_bad else "none"
        return "\n".join([*lines, f"first bad stage on '{self.shapes}': {found}"])

    def to_json(self) -> dict[str, Json]:
        points: list[Json] = [
            {
                "stage": point.stage,
                "own": _to_json(point.own),
                "drift": _to_json(point.drift),
                "worst_token": _to_json(point.worst_token),
            }
            for point in self.points
        ]
        return {"shapes": self.shapes, "points": points, "first_bad": self.first_bad, "cause": self.cause}

    @staticmethod
    def from_json(value: JsonObject) -> LayerCurve:
        """Read back what `to_json` wrote."""
        top = Fields(value, "report.layers", ["shapes", "points", "first_bad", "cause"])
        return LayerCurve(
            shapes=top.text("shapes"),
            points=tuple(_point(entry) for entry in top.items("points")),
            first_bad=top.optional_text("first_bad"),
            cause=top.text("cause"),
        )


def _point(value: Json) -> LayerPoint:
    names = ["stage", "own", "drift", "worst_token"]
    point = Fields(value, "report.layers.points", names)
    assert isinstance(value, Mapping)
    own, drift, worst = (_from_json(value[name], name) for name in names[1:])
    return LayerPoint(stage=point.text("stage"), own=own, drift=drift, worst_token=worst)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _to_json(value: float | None) -> Json:
    if value is None:
        return None
    return value if abs(value) < float("inf") else str(value)


def _from_json(value: Json, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(f"report.layers: {where} is {str(value)[:40]!r}; a number is expected. Check again.")
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise InputError(f"report.layers: {where} is {value[:40]!r}; a number is expected. Check again.")
    return float(value)
