"""One HTML file about a bundle: what it was made of, how exact it is, what it takes. It loads nothing."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from vlexport.bundle import Bundle
from vlexport.parity.report import ParityReport, Row
from vlexport.runtime.outputs import provenance

STYLE = """
body { font: 15px sans-serif; margin: 2em auto; max-width: 72em; color: #16181d }
table { border-collapse: collapse; margin: 1em 0 }
td, th { border-bottom: 1px solid #ccc; padding: 3px 12px 3px 0; text-align: left; vertical-align: top }
td i { display: block; background: #5ec494; height: 6px }
.passed { color: #1a7f37 }
.failed, .blocked { color: #b3261e; font-weight: bold }
td i.over { background: #b3261e }
"""


def page(bundle: Bundle) -> str:
    """Return the page of a bundle, with the verdict that counts for this user."""
    made, report = bundle.manifest, ParityReport.from_json(bundle.verdict.table)
    name, target = _text(bundle.path.resolve().name), made.target.tag
    origin = {**provenance(bundle), "profile": made.profile.name, "target": target, "created": made.created}
    facts = [(key.replace("_", " "), value) for key, value in origin.items()]
    sizes = [(str(each), known.min, known.opt, known.max) for each, known in made.profile.ranges.items()]
    tensors = [
        (each.name, each.dtype, ", ".join(map(str, each.shape))) for each in (*made.inputs, *made.outputs)
    ]
    files = [(each, f"{known.size:,}", known.sha256) for each, known in made.files.items()]
    curve = f"<h2>Block by block</h2><pre>{_text(report.layers.table())}</pre>" if report.layers else ""
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>
<style>{STYLE}</style><h1>{name}</h1>
<p>Accuracy check: <b class="{report.status}">{report.status}</b></p>
{_table(("made of", ""), facts)}
<h2>Accuracy, against transformers with the same weights</h2>
<p>A bar is the share of its limit that an error takes; it is full at the limit.</p>
<table><tr><th>level<th>check<th>on<th>error<th>limit<th><th>verdict</tr>
{"".join(map(_row, report.rows))}</table>
<p>{_text(" ".join(report.conclusion()))}</p>{curve}
<h2>Sizes</h2>{_table(("size", "smallest", "usual", "largest"), sizes)}
{_table(("tensor", "dtype", "shape"), tensors)}
<h2>Files</h2>{_table(("file", "bytes", "sha256"), files)}
</html>
"""


def _row(row: Row) -> str:
    cells = "".join(f"<td>{_text(each)}" for each in (row.level, row.check, row.shapes))
    lines = [(name, value, row.limits.get(name)) for name, value in row.metrics.items()]
    errors = "<br>".join(_text(f"{name} {value:.3g}") for name, value, _ in lines)
    limits = "<br>".join("" if limit is None else f"{limit:.3g}" for *_, limit in lines)
    bars = "".join(_bar(value / limit) for _, value, limit in lines if limit)
    verdict = f'<td class="{row.verdict}">{row.verdict}</tr>\n'
    return f'<tr>{cells}<td>{errors}<td>{limits}<td width="100">{bars}{verdict}'


def _bar(share: float) -> str:
    if share <= 1:
        return f'<i style="width: {max(1, round(100 * share))}%"></i>'
    # NaN too.
    return '<i class="over" style="width: 100%"></i>'


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    names = "".join(f"<th>{_text(each)}" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{names}</tr>\n{body}</table>"


def _text(value: object) -> str:
    return html.escape(str(value))
