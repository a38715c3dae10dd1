"""The support table of README.md, from what recipes and backends say about themselves.

`python -m benchmarks.support_table README.md` rewrites the table between its two marks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vlexport.backends import backend_names, find_backend
from vlexport.errors import RequestError
from vlexport.recipe import list_recipes

BEGIN = "<!-- support table, written by `make docs` -->"
END = "<!-- end of support table -->"


def support_table() -> str:
    """One table of recipes and one of backends, in Markdown."""
    recipes = [
        f"| `{card.name}` | {', '.join(f'`{name}`' for name in card.model_types)} | {card.summary} |"
        for card in list_recipes()
    ]
    return "\n".join(
        [
            "| recipe | model types | what it exports |",
            "|---|---|---|",
            *recipes,
            "",
            "| backend | precision | extra to install | what it runs |",
            "|---|---|---|---|",
            *(_backend_row(name) for name in backend_names()),
        ]
    )


def _backend_row(name: str) -> str:
    backend = find_backend(name)
    precisions = ", ".join(
        f"`{able.spelled}`" + (f" ({able.note})" if able.note else "") for able in backend.capabilities
    )
    extra = f"`vlexport[{backend.extra}]`" if backend.extra else "none"
    return f"| `{name}` | {precisions} | {extra} | {backend.summary} |"


def with_table(text: str) -> str:
    """The text with the table between its marks written anew."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise RequestError(f"no place for the support table: expected a line '{BEGIN}' and a line '{END}'.")
    return f"{head}{BEGIN}\n{support_table()}\n{END}{tail}"


def main(paths: list[str]) -> None:
    """Rewrite the table in each of these files."""
    for path in map(Path, paths):
        path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
