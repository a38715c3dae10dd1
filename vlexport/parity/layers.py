"""Where an engine drifts from the reference: error after every block, the first bad one, and why."""

from __future__ import annotations

from dataclasses import dataclass

from vlexport.codec import Measure


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


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"
