"""Line charts as SVG, one panel below the other, for light and dark pages; nothing is loaded."""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

WIDTH, LEFT, RIGHT, TOP, PLOT, GAP, LEGEND = 760, 64, 24, 64, 240, 74, 26
# After Okabe and Ito, whose colours people with any colour vision distinguish; each curve also has a marker
# and a dash of its own.
COLOURS = ("#0072b2", "#d98500", "#009e73", "#b3558b", "#6b7280", "#d55e00")
DARK = ("#4aa8e0", "#f0b040", "#2bc79a", "#e08fc0", "#aab2bf", "#ff8a4a")
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "4 4", "1 4")
# A circle, a square, a diamond, a triangle, a cross and a bar.
MARKERS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "m-4 -4h8v8h-8z", "m0 -5l5 5l-5 5l-5 -5z", "m0 -5l5 9h-10z",
    "m-4 -4l8 8m0 -8l-8 8", "m-5 0h10",
)  # fmt: skip
# Curves are shifted by this many pixels, so that bars of equal points stay apart.
BESIDE = 5

STYLE = """
.vlx { font: 13px sans-serif; max-width: 100%; height: auto; --paper: #fff; --ink: #16181d; --line: #d5d8de }
.vlx .paper { fill: var(--paper) }
.vlx text { fill: var(--ink) }
.vlx .title { font-size: 15px; font-weight: bold }
.vlx .line { stroke: var(--line); fill: none }
.vlx .level { stroke: var(--ink); stroke-dasharray: 3 3; fill: none }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A point and, where it has one, its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points under one name; `joined` by a line unless they are too uncertain for one."""

    name: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Curves over one axis, with a named level across them.

    holds  values that the axis has to hold whatever the points are
    most   the end of the axis where values cannot pass it
    """

    title: str
    curves: Sequence[Curve]
    level: tuple[str, float] | None = None
    holds: Sequence[float] = ()
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values from `start` to `stop` on pixels, with a tick at each `step`."""

    start: float
    stop: float
    step: float
    pixels: tuple[float, float]

    def at(self, value: float) -> float:
        share = (value - self.start) / (self.stop - self.start)
        return self.pixels[0] + share * (self.pixels[1] - self.pixels[0])

    def ticks(self) -> list[float]:
        count = round((self.stop - self.start) / self.step)
        return [self.start + self.step * number for number in range(count + 1)]


def _axis(values: Sequence[float], pixels: tuple[float, float], most: float = math.inf) -> _Axis:
    low, high = min(values), max(values)
    rough = (high - low or abs(high) or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    start, stop = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    stop = min(stop if stop > start else start + step, max(most, start + step))
    return _Axis(start, stop, step, pixels)


def draw(title: str, about: str, below: str, panels: Sequence[Panel]) -> str:
    """Return a whole SVG file: panels over one x axis, which `below` names, and a legend."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    height = TOP + len(panels) * (PLOT + GAP) + LEGEND
    drawn = "\n".join(
        line
        for number, panel in enumerate(panels)
        for line in _panel(panel, below, names, TOP + 20 + number * (PLOT + GAP))
    )
    joined = {curve.name for panel in panels for curve in panel.curves if curve.joined}
    legend = "\n".join(_legend(names, joined, height - LEGEND / 2))
    styles = STYLE + _colours(COLOURS) + "@media (prefers-color-scheme: dark) {\n"
    styles += ".vlx { --paper: #16181d; --ink: #e8eaee; --line: #3a3f49 }\n" + _colours(DARK) + "}\n"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" class="vlx" viewBox="0 0 {WIDTH} {height}" \
width="{WIDTH}" role="img">
<title>{_text(title)}</title><desc>{_text(about)}</desc>
<style>{styles}</style>
<rect class="paper" width="{WIDTH}" height="{height}"/>
<text class="title" x="16" y="26">{_text(title)}</text>
<text x="16" y="46">{_text(about)}</text>
{drawn}
{legend}
</svg>
"""


def _colours(colours: Sequence[str]) -> str:
    return "".join(
        f".vlx .c{number} {{ stroke: {colour}; fill: {colour} }}\n" for number, colour in enumerate(colours)
    )


def _panel(panel: Panel, below: str, names: Sequence[str], top: float) -> Iterator[str]:
    points = [point for curve in panel.curves for point in curve.points]
    reached = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    reached += [*panel.holds, *([panel.level[1]] if panel.level else [])]
    xs = _axis([0.0, *(point.x for point in points)], (LEFT + 14, WIDTH - RIGHT - 14))
    ys = _axis(reached, (top + PLOT, top), panel.most)
    yield f'<text x="16" y="{top - 10:.0f}">{_text(panel.title)}</text>'
    for tick in ys.ticks():
        y = ys.at(tick)
        yield f'<path class="line" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for tick in xs.ticks():
        yield f'<text x="{xs.at(tick):.1f}" y="{top + PLOT + 18:.0f}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{top + PLOT + 36:.0f}" text-anchor="end">{_text(below)}</text>'
    if panel.level:
        name, value = panel.level
        yield f'<path class="level" d="M{LEFT} {ys.at(value):.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT + 4}" y="{ys.at(value) - 5:.1f}">{_text(name)} {value:.3g}</text>'
    for curve in panel.curves:
        yield from _curve(curve, xs, ys, names)


def _curve(curve: Curve, xs: _Axis, ys: _Axis, names: Sequence[str]) -> Iterator[str]:
    number = names.index(curve.name)
    aside = BESIDE * (number - (len(names) - 1) / 2)
    placed = [(xs.at(point.x) + aside, ys.at(point.y), point) for point in curve.points]
    if curve.joined:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in placed)
        yield f'<path {_ink(number)} style="fill: none" stroke-width="2" d="M{line}"/>'
    for x, y, point in placed:
        if point.low is not None and point.high is not None:
            yield f'<path {_plain(number)} d="M{x:.1f} {ys.at(point.low):.1f}V{ys.at(point.high):.1f}"/>'
        bounds = "" if point.low is None else f" ({point.low:.4g} to {point.high:.4g})"
        yield _marker(number, x, y, f"{curve.name}: {point.y:.4g}{bounds} at {point.x:.3g}")


def _legend(names: Sequence[str], joined: Collection[str], y: float) -> Iterator[str]:
    x = float(LEFT)
    for number, name in enumerate(names):
        if name in joined:
            yield f'<path {_ink(number)} stroke-width="2" d="M{x:.0f} {y:.0f}h30"/>'
        yield _marker(number, x + 15, y, name)
        yield f'<text x="{x + 38:.0f}" y="{y + 4:.0f}">{_text(name)}</text>'
        x += 62 + 8 * len(name)


def _ink(number: int) -> str:
    return f'{_plain(number)} stroke-dasharray="{DASHES[number % len(DASHES)]}"'


def _plain(number: int) -> str:
    return f'class="c{number % len(COLOURS)}"'


def _marker(number: int, x: float, y: float, about: str) -> str:
    path = MARKERS[number % len(MARKERS)]
    hint = f"<title>{_text(about)}</title>"
    return f'<path {_plain(number)} stroke-width="1.5" d="M{x:.1f} {y:.1f}{path}">{hint}</path>'


def _text(value: object) -> str:
    return html.escape(str(value))
