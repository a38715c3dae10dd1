"""What raw samples say: paired ratios, distance to the ceiling, memory, growth, and whether to believe it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vlexport.bench.contenders import BASELINE, TWIN
from vlexport.bench.ratios import Interval, log_slope, paired
from vlexport.bench.results import Cell, Entry, Result

# A twin that strays further says that the machine was too noisy to tell contenders apart.
WIDEST_TWIN = 0.05
LEAST_SIZES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One contender in one cell; what could not be measured is none."""

    name: str
    entry: Entry
    seconds: float | None = None
    faster: Interval | None = None
    of_ceiling: Interval | None = None
    growth_per_patch: float | None = None


def timed(cell: Cell) -> dict[str, Entry]:
    """Contenders with a sample in every round."""
    return {
        name: entry
        for name, entry in cell.entries.items()
        if entry.status == "timed" and len(entry.seconds) == len(cell.rounds) > 0
    }


def kept_rounds(cell: Cell, slow_probe: float) -> list[int]:
    """Rounds whose product ran at least at this share of the cell's best; all of them if too few are left."""
    rates = _rates(cell, "float32")
    if not rates:
        return list(range(len(cell.rounds)))
    kept = [index for index, rate in enumerate(rates) if rate >= slow_probe * max(rates)]
    return kept if len(kept) >= min(3, len(rates)) else list(range(len(rates)))


def _rates(cell: Cell, dtype: str) -> list[float]:
    """Operations per second of the fastest library's product, round by round."""
    products = [entry for entry in timed(cell).values() if entry.kind == "product" and entry.dtype == dtype]
    columns = zip(*(entry.seconds for entry in products), strict=True)
    return [cell.product_operations / min(column) for column in columns]


def findings(cell: Cell, slow_probe: float) -> list[Finding]:
    """Every contender of the cell, products left out."""
    kept, runs = kept_rounds(cell, slow_probe), timed(cell)
    found = []
    for name, entry in cell.entries.items():
        if entry.kind == "product":
            continue
        if name not in runs:
            found.append(Finding(name=name, entry=entry))
            continue
        own = [entry.seconds[index] for index in kept]
        base = runs.get(BASELINE)
        rates = _rates(cell, entry.dtype)
        floor = [cell.operations / rates[index] for index in kept] if rates else []
        found.append(
            Finding(
                name=name,
                entry=entry,
                seconds=statistics.median(own),
                faster=paired([base.seconds[index] for index in kept], own) if base else None,
                of_ceiling=paired(floor, own) if floor else None,
                growth_per_patch=entry.growth_bytes / cell.patches if entry.growth_bytes else None,
            )
        )
    return found


def ceilings(cell: Cell) -> dict[str, float]:
    """Operations per second of each product, median over the rounds."""
    return {
        name: cell.product_operations / statistics.median(entry.seconds)
        for name, entry in timed(cell).items()
        if entry.kind == "product"
    }


def twin(cell: Cell, slow_probe: float) -> Interval | None:
    """One contender over itself, in two processes; 1 where the machine was quiet."""
    runs, kept = timed(cell), kept_rounds(cell, slow_probe)
    for name, entry in runs.items():
        original = runs.get(name.removesuffix(TWIN))
        if name.endswith(TWIN) and original is not None:
            pair = [[each.seconds[index] for index in kept] for each in (entry, original)]
            return paired(*pair)
    return None


def is_void(yardstick: Interval | None) -> bool:
    """Whether the cell's times are noise: its twins differ, or agree only by being blurred."""
    if yardstick is None:
        return True
    return not yardstick.low <= 1.0 <= yardstick.high or yardstick.half_width > WIDEST_TWIN


def padding(cell: Cell) -> dict[str, float]:
    """Score entries computed over needed, by kind of block; 1 means no padding."""
    return {kind: computed / needed for kind, (computed, needed) in cell.scores.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Exponents of growth over a series; 1 is linear."""

    name: str
    sizes: int
    of_seconds: float
    of_memory: float | None


def growth(result: Result, series: str, slow_probe: float) -> list[Growth]:
    """Contenders that were timed at `LEAST_SIZES` sizes of a series or more."""
    cells = sorted(
        (cell for cell in result.cells.values() if cell.series == series), key=lambda cell: cell.patches
    )
    found: dict[str, list[tuple[int, Finding]]] = {}
    for cell in cells:
        for finding in findings(cell, slow_probe):
            if finding.seconds is not None:
                found.setdefault(finding.name, []).append((cell.patches, finding))
    return [_growth(name, rows) for name, rows in found.items() if len(rows) >= LEAST_SIZES]


def _growth(name: str, rows: list[tuple[int, Finding]]) -> Growth:
    def slope(value: Callable[[Finding], float | None]) -> float | None:
        pairs = [(patches, value(finding)) for patches, finding in rows]
        known = [(patches, found) for patches, found in pairs if found]
        if len(known) < LEAST_SIZES:
            return None
        return log_slope([patches for patches, _ in known], [found for _, found in known])

    seconds = slope(lambda finding: finding.seconds)
    assert seconds is not None, "every row is timed"
    memory = slope(lambda finding: finding.entry.growth_bytes)
    return Growth(name=name, sizes=len(rows), of_seconds=seconds, of_memory=memory)


def slow_probe_of(plan: Mapping[str, object]) -> float:
    """The rule that the run was made under."""
    found = plan["slow_probe"]
    assert isinstance(found, float)
    return found
