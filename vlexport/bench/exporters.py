"""What transformers' own ONNX exporter returns for shapes on and off the window grid, beside ours.

`python -m vlexport.bench.exporters` writes docs/exporters.md. Theirs is taken at its best, exported anew from
each very shape, and as one program for all shapes; ours is one graph for all of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from vlexport.backends import Engine, Options, find_backend
from vlexport.bench.engines import build_engine, open_engine
from vlexport.bench.foreign import Exported, export_reference, inputs_of
from vlexport.bench.models import (
    Grid,
    TowerSize,
    contents_of,
    default_recipe,
    random_items,
    write_tower,
)
from vlexport.checkpoint import Checkpoint
from vlexport.export import export
from vlexport.parity.metrics import Incomparable, compare
from vlexport.recipe import Recipe, Reference, recipe_for
from vlexport.specs import MediaItem

PAGE = Path("docs/exporters.md")
OURS = "onnxruntime"
SIZE = TowerSize(depth=4, width=64, heads=4, inner=128, out=64, full_blocks=(1, 3))

# Windows are 8 x 8 patches; the first four grids are cut into whole ones.
SHAPES: tuple[tuple[Grid, ...], ...] = (
    ((1, 16, 16),),
    ((1, 32, 32),),
    ((1, 8, 24),),
    ((2, 16, 16),),
    ((1, 10, 14),),
    ((1, 18, 26),),
    ((1, 16, 18),),
    ((1, 4, 60),),
    ((6, 12, 18),),
    ((1, 16, 24), (1, 10, 14), (2, 8, 12)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How far a program's tokens are from the reference's, or why there are none."""

    relative_l2: float = float("nan")
    worst_token: float = float("nan")
    error: str = ""

    def cell(self) -> str:
        return self.error or f"{self.relative_l2:.1e} / {self.worst_token:.1e}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One shape: theirs exported from it, theirs exported once, ours exported once."""

    grids: tuple[Grid, ...]
    whole_windows: bool
    theirs: Outcome
    theirs_once: Outcome
    ours: Outcome


def compare_shapes(
    folder: Path, shapes: Sequence[tuple[Grid, ...]] = SHAPES, *, once: bool = True
) -> list[Row]:
    """Run every shape through both; without `once` their single program for all shapes is left out."""
    tower = write_tower(folder / "tower", contents_of(default_recipe(), SIZE))
    checkpoint = Checkpoint.open(tower)
    recipe = recipe_for(checkpoint)
    config = recipe.read_config(checkpoint)
    reference = recipe.reference(checkpoint)
    general = _Once(reference, random_items(recipe, config, shapes[0])) if once else None
    form = find_backend(OURS).form
    with closing(_our_engine(recipe, checkpoint, folder / "ours")) as engine:
        rows = []
        for grids in shapes:
            items = random_items(recipe, config, grids)
            expected = reference.run(items)["embeds"]
            ours = engine.run(recipe.prepare(config, items, form))["embeds"]
            rows.append(
                Row(
                    grids=grids,
                    whole_windows=_whole_windows(recipe, config, items),
                    theirs=_outcome(_exported_here(reference, items), expected),
                    theirs_once=_outcome(_run_general(general, items), expected),
                    ours=_distance(ours, expected),
                )
            )
    return rows


def _our_engine(recipe: Recipe[Any], checkpoint: Checkpoint, folder: Path) -> Engine:
    backend, options = find_backend(OURS), Options(threads=1)
    graph = export(recipe, checkpoint, form=backend.form)
    folder.mkdir(parents=True)
    build_engine(graph, backend, folder, options)
    return open_engine(backend, folder, options)


def _whole_windows(recipe: Recipe[Any], config: Any, items: Sequence[MediaItem]) -> bool:
    """All windows of the call are of one size."""
    return len(recipe.prepare(config, items, "runs")["window_runs"]) == 1


def _exported_here(reference: Reference, items: Sequence[MediaItem]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        exported, inputs = export_reference(reference, items)
        return exported.run(inputs)

    return run


class _Once:
    """One program for all shapes, exported when it is first run."""

    def __init__(self, reference: Reference, items: Sequence[MediaItem]) -> None:
        self._reference = reference
        self._items = items
        self._exported: Exported | None = None

    def run(self, items: Sequence[MediaItem]) -> Tensor:
        if self._exported is None:
            self._exported = export_reference(self._reference, self._items, dynamic=True)[0]
        return self._exported.run(inputs_of(self._reference, items)[0])


def _run_general(general: _Once | None, items: Sequence[MediaItem]) -> Callable[[], Tensor] | None:
    return None if general is None else lambda: general.run(items)


def _outcome(run: Callable[[], Tensor] | None, expected: Tensor) -> Outcome:
    if run is None:
        return Outcome(error="not asked")
    try:
        found = run()
    except Exception as error:  # noqa: BLE001  whatever another library raises is the finding
        first = str(error).strip().splitlines()[0]
        return Outcome(error=f"{type(error).__name__}: {first[:90]}")
    return _distance(found, expected)


def _distance(found: Tensor, expected: Tensor) -> Outcome:
    metrics = compare(found, expected)
    if isinstance(metrics, Incomparable):
        return Outcome(error=metrics.reason)
    return Outcome(relative_l2=metrics.relative_l2, worst_token=metrics.worst_token)


HEAD = """\
# What transformers' own ONNX exporter returns

Written by `python -m vlexport.bench.exporters`; a test repeats two of the rows.

{versions}; a random tower of depth {depth} and width {width} with sharp weights
(standard deviation 1/sqrt(fan in), queries and keys doubled), float32. All programs run in ONNX Runtime.
Each cell is relative L2 / worst token against the Hugging Face tower in eager mode with the same weights and
pixels, or the error that was raised.

- **theirs, this shape**: `OnnxExporter().export` from the very shape of the row, the best it can do.
- **theirs, once**: one export with `dynamic=True` from the shape of the first row.
- **ours, once**: one graph for all rows.

| frames x rows x columns in patches | windows | theirs, this shape | theirs, once | ours, once |
|---|---|---|---|---|
"""

FOOT = """
Numbers near 1 are wrong answers that came back without an error. Their program splits a call into equal
segments; that all windows of a call are of one size is checked when the tower is traced to torch, and the
check is lost on the way to ONNX. The program that is exported once keeps the number of
frames that it was exported with, one, as well.
"""


def page_of(rows: Sequence[Row]) -> str:
    """The findings in Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "onnxscript"))
    head = HEAD.format(versions=versions, depth=SIZE.depth, width=SIZE.width)
    return head + "".join(_line(row) + "\n" for row in rows) + FOOT


def _line(row: Row) -> str:
    grids = " + ".join("x".join(map(str, grid)) for grid in row.grids)
    windows = "all of one size" if row.whole_windows else "of several sizes"
    cells = [outcome.cell().replace("|", "\\|") for outcome in (row.theirs, row.theirs_once, row.ours)]
    return f"| {grids} | {windows} | {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> None:
    """Measure all shapes and write the page."""
    parser = argparse.ArgumentParser(prog="python -m vlexport.bench.exporters", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes")
    page: Path = parser.parse_args(arguments).page
    with tempfile.TemporaryDirectory() as folder:
        text = page_of(compare_shapes(Path(folder)))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
