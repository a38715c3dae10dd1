"""Outputs of transformers' own ONNX exporter for shapes on and off the window grid, next to ours.

`python -m benchmarks.exporters` writes the table of docs/results/exporters.md. Theirs is taken at its best,
exported anew from each very shape, and as one program for all shapes; ours is one graph for all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from benchmarks.foreign import Exported, export_reference, inputs_of
from benchmarks.options import parser_of
from benchmarks.plans import Contender
from benchmarks.tables import markdown, marks, write_between
from benchmarks.towers import Grid, TowerSize, default_recipe, random_items, write_tower
from benchmarks.worker import Job, Server
from vlexport.parity.metrics import Incomparable, compare
from vlexport.recipe import Reference
from vlexport.specs import MediaItem

PAGE = Path("docs/results/exporters.md")
OURS = Contender(name="onnxruntime float32", kind="ours", library="onnxruntime")
SIZE = TowerSize(depth=4, width=64, heads=4, inner=128, out=64, full_blocks=(1, 3))
HEAD = ("frames x rows x columns in patches", "windows", "theirs, this shape", "theirs, once", "ours, once")
# Windows are 8 x 8 patches; the first four grids are cut into whole ones.
SHAPES: tuple[tuple[Grid, ...], ...] = (
    ((1, 16, 16),), ((1, 32, 32),), ((1, 8, 24),), ((2, 16, 16),),
    ((1, 10, 14),), ((1, 18, 26),), ((1, 16, 18),), ((1, 4, 60),), ((6, 12, 18),),
    ((1, 16, 24), (1, 10, 14), (2, 8, 12)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Distance of a program's tokens from the reference's, or the reason that there are none."""

    relative_l2: float = float("nan")
    worst_token: float = float("nan")
    error: str = ""

    def __str__(self) -> str:
        return self.error.replace("|", "\\|") or f"{self.relative_l2:.1e} / {self.worst_token:.1e}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One shape: theirs exported from it, theirs exported once, ours exported once."""

    grids: tuple[Grid, ...]
    whole_windows: bool
    theirs: Outcome
    theirs_once: Outcome
    ours: Outcome


def compare_shapes(
    folder: Path, shapes: Sequence[tuple[Grid, ...]] = SHAPES, *, once: bool = True, seed: int = 0
) -> list[Row]:
    """Run every shape through both; without `once` their single program for all shapes is left out.

    `seed` draws the weights of the tower and the pixels.
    """
    tower = write_tower(folder / f"tower-{seed}", default_recipe(), SIZE, seed=seed)
    server = Server(Job(contender=OURS, tower=tower, folder=folder / f"ours-{seed}", threads=1))
    server.open(server.build()[1])
    recipe, config = server.recipe, server.config
    reference = recipe.reference(server.checkpoint)

    @cache
    def general() -> Exported:
        return export_reference(reference, random_items(recipe, config, shapes[0]), dynamic=True)[0]

    def theirs(items: Sequence[MediaItem]) -> Tensor:
        exported, inputs = export_reference(reference, items)
        return exported.run(inputs)

    def theirs_once(items: Sequence[MediaItem]) -> Tensor:
        return general().run(inputs_of(reference, items)[0])

    def ours(items: Sequence[MediaItem]) -> Tensor:
        server.load(list(items))
        return server.run()

    rows = []
    for grids in shapes:
        items = random_items(recipe, config, grids, seed)
        rows.append(
            Row(
                grids=grids,
                whole_windows=len(recipe.prepare(config, items, "grouped")["window_runs"]) == 1,
                theirs=_outcome(theirs, reference, items),
                theirs_once=_outcome(theirs_once, reference, items) if once else Outcome(error="not run"),
                ours=_outcome(ours, reference, items),
            )
        )
    return rows


def _outcome(
    run: Callable[[Sequence[MediaItem]], Tensor], reference: Reference, items: Sequence[MediaItem]
) -> Outcome:
    (expected,) = reference.run(items).values()
    try:
        metrics = compare(run(items), expected)
    except Exception as error:  # noqa: BLE001  whatever another library raises is the finding
        first = next(iter(str(error).strip().splitlines()), "")
        return Outcome(error=f"{type(error).__name__}: {first[:90]}")
    if isinstance(metrics, Incomparable):
        return Outcome(error=metrics.reason)
    return Outcome(relative_l2=metrics.relative_l2, worst_token=metrics.worst_token)


def spread(folder: Path) -> str:
    """Return one sentence: smallest and largest error of the fifth shape over ten weights and pixels."""
    rows = [compare_shapes(folder, SHAPES[4:5], once=False, seed=seed)[0] for seed in range(10)]
    theirs, ours = [row.theirs.relative_l2 for row in rows], [row.ours.relative_l2 for row in rows]
    return (
        f"Row {_named(SHAPES[4])} with other weights and pixels (seeds 0 to 9), relative L2: theirs "
        f"{min(theirs):.2f} to {max(theirs):.2f}, ours {min(ours):.1e} to {max(ours):.1e}."
    )


def _named(grids: Sequence[Grid]) -> str:
    return " + ".join("x".join(map(str, grid)) for grid in grids)


def table(rows: Sequence[Row]) -> str:
    """Return the versions and the findings in Markdown."""
    windows = {True: "all of one size", False: "of several sizes"}
    cells = (
        (_named(row.grids), windows[row.whole_windows], *map(str, (row.theirs, row.theirs_once, row.ours)))
        for row in rows
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "onnxscript"))
    return "\n".join([f"{versions}.", "", *markdown(HEAD, cells)])


if __name__ == "__main__":
    page: Path = parser_of("exporters", __doc__, {"--page": PAGE}).parse_args().page
    with tempfile.TemporaryDirectory() as folder:
        rows = compare_shapes(Path(folder))
        text = f"{table(rows)}\n\n{spread(Path(folder) / 'spread')}"
        write_between(page, *marks("exporters", "python -m benchmarks.exporters"), text)
