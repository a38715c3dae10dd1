"""The support table of README.md, from what recipes and backends declare.

`python -m benchmarks.support_table README.md` rewrites the table between its two marks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.tables import markdown, replaced
from vlexport.backends import backend_names, find_backend
from vlexport.recipe import list_recipes

BEGIN = "<!-- support table, written by `make docs` -->"
END = "<!-- end of support table -->"


def with_table(text: str) -> str:
    """Return the text with the tables of recipes and backends between the marks written anew."""
    recipes = [
        (f"`{card.name}`", ", ".join(f"`{name}`" for name in card.model_types), card.summary)
        for card in list_recipes()
    ]
    backends = []
    for backend in map(find_backend, backend_names()):
        notes = ((each.spelled, f" ({each.note})" if each.note else "") for each in backend.capabilities)
        precisions = ", ".join(f"`{name}`{note}" for name, note in notes)
        extra = f"`vlexport[{backend.extra}]`" if backend.extra else "none"
        backends.append((f"`{backend.name}`", precisions, extra, backend.summary))
    lines = [
        *markdown(("recipe", "model types", "what it exports"), recipes),
        "",
        *markdown(("backend", "precision", "extra to install", "what it runs"), backends),
    ]
    return replaced(text, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
