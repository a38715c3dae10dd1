"""The results of a run as Markdown: one table a step, each measured time beside its roofline or floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

# Columns by step, in this order; a step without columns here shows what its rows have.
COLUMNS = {
    "machine": ("name", "p50_ms", "rate"),
    "towers": (
        "name", "tokens", "p50_ms", "p90_ms", "wall_p50_ms", "roofline_ms", "over_roofline", "relative_l2",
        "peak_bytes", "first_s",
    ),
    "captures": (
        "name", "capture_s", "bytes", "replay_ms", "uncaptured_ms", "gain", "p50_ms", "over_roofline",
    ),
    "pruning": ("name", "kept", "evs_us", "positions_us", "both_us", "evs_floor_us"),
    "decoder": (
        "name", "prefill_ms", "prefill_floor_ms", "token_ms", "token_floor_ms", "tokens_per_s",
    ),
    "soak": ("name", "p50_s", "growth", "memory"),
    "bundles": ("name", "parity", "seconds"),
}  # fmt: skip
COLUMNS |= dict.fromkeys(("inductor", "hf_compiled"), COLUMNS["towers"])


def table(results: Mapping[str, Any]) -> str:
    """Return all steps as Markdown; what was skipped stands below its table, with the reason."""
    lines = ["# One GPU, step by step", "", results["about"], ""]
    for name, step in results["steps"].items():
        lines += [f"## {name}: {step['status']} ({step['seconds']:.0f} s)", ""]
        rows = [row for row in step["rows"] if not _reason(row)]
        columns = [each for each in COLUMNS.get(name, ("name",)) if any(each in row for row in rows)]
        if name == "tests":
            columns = sorted({key for row in rows for key in row}, key=lambda key: (key != "name", key))
        if rows and columns:
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for row in rows]
            lines.append("")
        lines += _reasons(step["rows"])
    return "\n".join(lines).rstrip() + "\n"


def _reason(row: Row) -> str:
    """Return why a row holds no measurement, or nothing if it does."""
    found = ((tag, row[tag]) for tag in ("skipped", "failure", "error") if isinstance(row.get(tag), str))
    return next((f"{tag}: {text}" for tag, text in found), "")


def _reasons(rows: Sequence[Row]) -> list[str]:
    found = [f"* {row['name']}: {_reason(row)}" for row in rows if _reason(row)]
    return [*found, ""] if found else []


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
