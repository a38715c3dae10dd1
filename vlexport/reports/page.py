"""One offline HTML file about a bundle; numbers stand in `data` elements with their whole values."""

from __future__ import annotations

import base64
import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from vlexport.bundle import Bundle, Manifest, command
from vlexport.bundle.trust import Proved
from vlexport.codec import Json, encode
from vlexport.parity.report import WORDS, ParityReport, Row
from vlexport.reports.chart import Curve, Panel, Point, draw
from vlexport.reports.facts import BundleFacts
from vlexport.reports.results import Contender, Planned, Results, Timed, is_of
from vlexport.reports.sweep import Sweep

MIB = 2**20
# Parts of a manifest's identity by the section that shows them; all others are settings.
SHOWN_IN = {
    **dict.fromkeys(("key", "created", "checkpoint", "recipe"), "Provenance"),
    **dict.fromkeys(("target", "versions"), "Environment"),
    **dict.fromkeys(("profile", "inputs", "outputs"), "Sizes"),
}
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #16181d; --faint: #5b6270; --line: #d5d8de;
  --box: #f5f6f8; --good: #1a7f37; --bad: #b3261e; --bar: #5ec494 }
@media (prefers-color-scheme: dark) { :root { --paper: #16181d; --ink: #e8eaee; --faint: #a0a7b4;
  --line: #3a3f49; --box: #1f2229; --good: #5ec494; --bad: #ff7b72; --bar: #2f8f62 } }
* { box-sizing: border-box }
body { font: 15px/1.45 sans-serif; margin: 0 auto; max-width: 88em; padding: 1em 1.2em 3em;
  color: var(--ink); background: var(--paper) }
h1 { font-size: 1.5em; overflow-wrap: anywhere; margin: .4em 0 }
h2 { font-size: 1.15em; margin: 2em 0 .4em; padding-top: .8em; border-top: 1px solid var(--line) }
p { margin: .5em 0; max-width: 60em; overflow-wrap: anywhere }
code { font: 13px monospace; overflow-wrap: anywhere }
summary { cursor: pointer; color: var(--faint); margin: .6em 0 }
.wide { overflow-x: auto; margin: .6em 0 }
.wide svg { min-width: 600px; display: block }
.wide img { display: block; max-width: none }
table { border-collapse: collapse; font-size: 14px }
td, th { border-bottom: 1px solid var(--line); padding: 4px 14px 4px 0; text-align: left;
  vertical-align: top }
th { color: var(--faint); font-weight: normal }
table.facts td + td { overflow-wrap: anywhere; min-width: 14em }
table.facts td:first-child { color: var(--faint); overflow-wrap: anywhere; min-width: 8em }
.figures { font-size: 13px; font-variant-numeric: tabular-nums }
.figures td, .figures th { padding-right: 12px; white-space: nowrap }
small { display: block; color: var(--faint); font-size: 12px; min-width: 14em; max-width: 44em }
.bar { display: block; min-width: 90px }
.bar i { display: block; background: var(--bar); height: 7px; margin: 7px 0 }
.bar i.over { background: var(--bad) }
.limited { display: grid; grid-template-columns: 9em 11em 90px; column-gap: .6em; white-space: nowrap }
.lines { background: var(--box); padding: .7em 1em; border-radius: 6px; max-width: 62em }
nav { display: flex; flex-wrap: wrap; gap: .3em 1.1em; margin: .8em 0 }
a { color: inherit }
@media (max-width: 40em) {
  body { padding: .5em .8em 2em }
  table.facts, table.facts tbody, table.facts tr, table.facts td { display: block }
  table.facts tr { border-bottom: 1px solid var(--line); padding: 4px 0 }
  table.facts td { border: 0; padding: 0; min-width: 0 }
}
.passed { color: var(--good) }
.failed, .blocked { color: var(--bad); font-weight: bold }
"""
# What a browser may do with the page, whatever it holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Markup(str):
    """Text that is HTML already; any other text is escaped."""

    __slots__ = ()


def page(bundle: Bundle, results: Results | None = None) -> str:
    """Return the page of a bundle, with the verdict that counts for this user."""
    results, facts = results or Results(), BundleFacts.of(bundle)
    manifest, name, origin = bundle.manifest, bundle.path.resolve().name, bundle.manifest.checkpoint
    groups: dict[str, dict[str, Json]] = {"Provenance": {"digest": bundle.digest}}
    for field, value in facts.identity.items():
        groups.setdefault(SHOWN_IN.get(field.partition(".")[0], "Settings"), {})[field] = value
    adapter = f" with the adapter {origin.adapter.name}" if origin.adapter else ""
    about = (
        f"The vision tower of {origin.name}{adapter} as an engine of {manifest.target.backend}, in "
        f"{manifest.precision.name}, for calls of profile {manifest.profile.name}."
    )
    sections = {
        "Accuracy": (_accuracy(facts.report) if facts.report else "") + _proof(bundle),
        "Drift by block": _drift(facts.report),
        "Latency": _latency(results.timings, bundle),
        "Padding and memory": _memory(results.plan),
        "Pruning": _sweep(results.sweep, bundle),
        "Kept tokens": _overlay(results.overlay),
        "Sizes": _sizes(bundle),
        "Settings": _facts(groups["Settings"]),
        "Provenance": f"{_facts(groups['Provenance'])}\n{_files(manifest)}\n",
        "Environment": _environment(groups["Environment"], results.timings),
    }
    places = {title: title.lower().replace(" ", "-") for title, content in sections.items() if content}
    contents = " ".join(f'<a href="#{place}">{title}</a>' for title, place in places.items())
    body = "\n".join(
        f'<section id="{place}"><h2>{title}</h2>\n{sections[title]}</section>'
        for title, place in places.items()
    )
    missing = re.sub("`(.*?)`", r"<code>\1</code>", _text(unmeasured(bundle, results)))
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{_text(name)}</title><style>{STYLE}</style></head><body>
<h1>{_text(name)}</h1>
<p>{_text(about)} Accuracy check: <b class="{facts.status}">{facts.status}</b>.</p>
<nav>{contents}</nav>
{f"<p>{missing}</p>" if missing else ""}
{body}
</body></html>
"""


def unmeasured(bundle: Bundle, results: Results) -> str:
    """Return a line that names what a page lacks with the command that measures it, or why it cannot."""
    report = BundleFacts.of(bundle).report
    lacking: dict[str, object] = {
        "Accuracy": report,
        "Drift by block": _drift(report),
        "Latency": results.timings,
        "Padding and memory": results.plan,
    }
    pruned = {"Pruning": results.sweep, "Kept tokens": results.overlay}
    if bundle.manifest.graphs.selector is not None:
        lacking |= pruned
    media = [] if all(lacking.get(title, True) for title in pruned) else ["VIDEO"]
    options = (*media, "--measure", "--output", "FILE")
    line = command(Path("BUNDLE"), bundle.manifest, "report", *options)
    reasons: dict[str, list[str]] = {}
    for title in (title for title, content in lacking.items() if not content):
        reasons.setdefault(results.unmet.get(title, f"`{line}` does it."), []).append(title.lower())
    parts = [f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items()]
    return f"Not measured: {' '.join(parts)}" if parts else ""


def _accuracy(report: ParityReport) -> str:
    levels: dict[str, Counter[str]] = {}
    for row in report.rows:
        levels.setdefault(row.level, Counter())[row.verdict] += 1
    counted = "; ".join(
        f"{level}: {', '.join(f'{count} {WORDS.get(word, word)}' for word, count in verdicts.items())}"
        for level, verdicts in sorted(levels.items())
    )
    nearest = "Nothing is compared by numbers."
    if worst := report.nearest():
        row, metric, share = worst
        check = f"{row.level} {row.check} on {row.shapes}"
        nearest = f"Nearest to its limit: {check}, {metric} takes {share:.1%} of it."
    lines = [report.summary(), *(report.conclusion() or [f"By level: {counted}", nearest])]
    return f"""<p class="lines">{"<br>".join(map(_text, lines))}</p>
<details{"" if report.passed else " open"}><summary>All {len(report.rows)} rows</summary>
<p>Against the model's own implementation with the same weights. A bar is the share of its limit that an error
takes; it is full at the limit.</p>
{_table(("level", "check", "on", "error, of its limit", "verdict"), _rows(report.rows))}</details>
"""


def _proof(bundle: Bundle) -> str:
    proof = bundle.manifest.proof
    if not proof.calls:
        return ""
    machines = "; and on ".join(sorted({proof.machine} | Proved.of().read(bundle.digest)))
    run = bundle.command("check", "--run")
    return f"""<p>Its own proof, {len(proof.calls)} stored calls, passed on {_text(machines)}.
<code>{_text(run)}</code> repeats it without the checkpoint.</p>
"""


def _rows(rows: Iterable[Row]) -> Iterator[Sequence[object]]:
    before = ""
    for row in rows:
        notes = [row.note, f"limit: {row.origin}" if row.origin != before else ""]
        before = row.origin
        rest = ", ".join(
            f"{_text(name)} {_number(value)}" for name, value in row.metrics.items() if name not in row.limits
        )
        small = "".join(f"<small>{_text(note)}</small>" for note in notes if note)
        limited = "".join(_limited(name, row.metrics.get(name), limit) for name, limit in row.limits.items())
        yield (
            row.level,
            Markup(f"{_text(row.check)}{small}"),
            row.shapes,
            Markup(f"{limited}<small>{rest}</small>" if rest else limited),
            Markup(f'<span class="{row.verdict}">{row.verdict}</span>'),
        )


def _limited(name: str, value: float | None, limit: float) -> str:
    bar = _bar(math.nan if value is None else value / limit) if limit else ""
    shown = "missing" if value is None else _number(value)
    return (
        f'<div class="limited"><span>{_text(name)}</span><span>{shown} of {_number(limit)}</span>'
        f'<span class="bar">{bar}</span></div>'
    )


def _bar(share: float) -> str:
    if share <= 1:
        return f'<i style="width: {max(1, round(100 * share))}%"></i>'
    # NaN too.
    return '<i class="over" style="width: 100%"></i>'


def _drift(report: ParityReport | None) -> str:
    if report is not None and report.is_whole:
        return "<p>The class is traced whole: it has no stages to compare.</p>"
    if report is None or report.layers is None:
        return ""
    curve, rows = report.layers, []
    for point in curve.points:
        # Eight powers of ten: from 1e-8 to an error as large as the output.
        share = 0.0 if not point.drift else 1 + math.log10(max(1e-8, min(point.drift, 1.0))) / 8
        bar = Markup(f'<div class="bar">{_bar(share)}</div>') if point.drift is not None else ""
        numbers = (_number(value, ".2e") for value in (point.own, point.worst_token, point.drift))
        mark = Markup('<span class="failed">first bad</span>' if point.stage == curve.first_bad else "")
        rows.append((point.stage, *numbers, bar, mark))
    stage = f"{curve.first_bad}: {curve.cause}" if curve.first_bad else "none"
    return f"""<p>Of sample '{_text(curve.shapes)}'. Own error: on the reference's input.
Drift: after everything before it; a bar is logarithmic, from 1e-8 to 1. First bad stage: {_text(stage)}.</p>
{_table(("stage", "own error", "worst token", "drift", "", ""), rows)}
"""


def _latency(timings: Sequence[Timed], bundle: Bundle) -> str:
    if not timings:
        return ""
    has_files = any(call.file for call in timings)
    machines = dict.fromkeys(_machine(call.machine) for call in timings)
    rows = [
        (
            *([Path(call.file or "").name] if has_files else []),
            _number(call.patches, ","),
            _number(call.tokens, ","),
            _contender(contender, bundle),
            *(_number(value, ".2f") for value in (contender.ms_p50, contender.ms_p90)),
            _ratio(contender),
            _number(contender.relative_l2, ".1e"),
            _number(contender.peak_bytes, ",.1f", MIB),
        )
        for call in timings
        for contender in call.contenders
    ]
    names = ("patches", "tokens", "contender", "ms p50", "ms p90", "times as fast", "relative L2", "GPU MiB")
    head = ["file", *names] if has_files else list(names)
    return f"""<p>On {"; and on ".join(machines)}.</p>
<p>Times of a call in milliseconds, in interleaved rounds. A reference is the model's own
class on the same weights. The twin is the same bundle again: where its interval does not contain 1, noise
is larger than ratios.</p>
{_time_chart(timings, bundle)}{_table(head, rows, "figures")}
"""


def _machine(machine: Mapping[str, Json]) -> str:
    """Return the processor with its threads, and the GPU where there is one."""
    names = [str(machine[name]) for name in ("processor", "gpu") if machine.get(name)]
    threads = machine.get("threads")
    counted = f", {_number(threads)} threads" if isinstance(threads, int) else ""
    return _text(" with ".join(names) or "a machine without a name") + counted


def _contender(contender: Contender, bundle: Bundle) -> str:
    if not is_of(contender, bundle.manifest):
        return Path(contender.name).name
    return "this bundle (twin)" if contender.name == f"{contender.base} (twin)" else "this bundle"


def _ratio(contender: Contender) -> Markup:
    if contender.ratio is None:
        return Markup(_text(f"cannot run here: {contender.reason}" if contender.reason else ""))
    median, low, high = (
        _number(value, ".2f") for value in (contender.ratio.median, contender.ratio.low, contender.ratio.high)
    )
    return Markup(f"{median} ({low} to {high})")


def _time_chart(timings: Sequence[Timed], bundle: Bundle) -> str:
    curves: dict[str, list[Point]] = {"this bundle": [], "reference": []}
    for call in timings:
        own = next(
            contender for contender in call.contenders if _contender(contender, bundle) == "this bundle"
        )
        base = next((contender for contender in call.contenders if contender.name == own.base), own)
        for name, contender in zip(curves, (own, base), strict=True):
            if contender.ms_p50 is not None:
                curves[name].append(Point(x=call.tokens, y=contender.ms_p50))
    if len({call.tokens for call in timings}) < 2:
        return ""
    drawn = [Curve(name=name, points=points) for name, points in curves.items() if points]
    panel = Panel(title="Time of a call, median, ms", curves=drawn, holds=[0.0])
    about = f"{len(timings)} calls of different sizes"
    return f'<div class="wide">{draw("Latency by size", about, "tokens of a call", [panel])}</div>\n'


def _memory(plan: Planned | None) -> str:
    if plan is None:
        return ""
    padding = [(kind, _number(share, ".1f", 0.01)) for kind, share in plan.padding.items()]
    memory: list[tuple[object, ...]] = [
        ("on disk", _number(plan.disk_bytes, ",.1f", MIB)),
        ("peak of the build", _number(plan.build_memory_bytes, ",.1f", MIB)),
    ]
    for name, patches, size in zip(
        ("smallest", "usual", "largest"), plan.patches, plan.run_memory_bytes or (None,) * 3, strict=True
    ):
        call = Markup(f"peak of the {name} call, {_number(patches, ',')} patches")
        memory.append((call, _number(size, ",.1f", MIB)))
    origin = f"<p>Estimated from: {_text(plan.origin)}.</p>" if plan.origin else ""
    return f"""{_table(("attention scores that are padding, at most", "%"), padding) if padding else ""}
{_table(("memory", "MiB"), memory)}
{origin}
"""


def _sweep(sweep: Sweep | None, bundle: Bundle) -> str:
    if sweep is None:
        prunes = bundle.manifest.graphs.selector is not None
        return "" if prunes else "<p>The family has nothing to prune.</p>"
    (head, rows), *others = sweep.tables()
    folded = "\n".join(
        f"<details><summary>{_text(head[0])}</summary>{_table(head, rows, 'figures')}</details>"
        for head, rows in others
    )
    picture = f'<div class="wide">{sweep.svg()}</div>'
    return f"<p>{_text(sweep.about())}.</p>\n{picture}\n{_table(head, rows, 'figures')}\n{folded}\n"


def _overlay(picture: bytes) -> str:
    if not picture:
        return ""
    source = base64.b64encode(picture).decode("ascii")
    return f"""<p>Bright cells are kept tokens.</p>
<div class="wide"><img alt="Frames with dropped tokens dimmed" src="data:image/png;base64,{source}"></div>
"""


def _sizes(bundle: Bundle) -> str:
    manifest = bundle.manifest
    ranges = [
        (str(symbol), *(_number(value, ",") for value in (bounds.min, bounds.opt, bounds.max)))
        for symbol, bounds in manifest.profile.ranges.items()
    ]
    tensors = [
        (spec.name, spec.dtype, Markup(", ".join(_spelled(encode(spec.shape)))))
        for spec in (*manifest.inputs, *manifest.outputs)
    ]
    return f"""{_table(("size", "smallest", "usual", "largest"), ranges)}
{_table(("tensor", "dtype", "shape"), tensors)}
"""


def _files(manifest: Manifest) -> str:
    files = [(name, _number(record.size, ","), record.sha256) for name, record in manifest.files.items()]
    return _table(("file", "bytes", "sha256"), files)


def _environment(facts: Mapping[str, Json], timings: Sequence[Timed]) -> str:
    machines = [call.machine for call in timings]
    others = [machine for at, machine in enumerate(machines) if machine not in machines[:at]]
    return "\n".join([_facts(facts), *(f"<p>Timed on:</p>\n{_facts(machine)}" for machine in others)]) + "\n"


def _facts(facts: Mapping[str, Json]) -> str:
    rows = [(name, Markup(", ".join(_spelled(value)))) for name, value in facts.items()]
    return _table((), rows, "facts")


def _spelled(value: Json) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield f"{_text(name)}: {', '.join(_spelled(item))}"
        if not value:
            yield "none"
    elif isinstance(value, list | tuple):
        for item in value or (None,):
            yield from _spelled(item)
    elif isinstance(value, bool):
        yield "yes" if value else "no"
    elif isinstance(value, int | float):
        yield _number(value, "")
    else:
        yield "none" if value is None else _text(value)


def _number(value: float | None, form: str = ".3g", unit: float = 1.0) -> Markup:
    """Return a number in its unit as readers see it, with the whole one for programs."""
    if value is None:
        return Markup("")
    shown = value if unit == 1 else value / unit
    return Markup(f'<data value="{encode(value)}">{shown:{form}}</data>')


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    names = f"<tr>{''.join(f'<th>{_text(title)}</th>' for title in head)}</tr>\n" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    style = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{style}>{names}{body}</table></div>'


def _text(value: object) -> str:
    return value if isinstance(value, Markup) else html.escape(str(value))
