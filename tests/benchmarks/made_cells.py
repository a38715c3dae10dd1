"""Cells with samples that were made up, for tests of what is concluded from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.results import Cell, Entry, Round


def made_entry(seconds: Sequence[float], kind: str = "ours", status: str = "timed") -> Entry:
    return Entry(
        status=status,
        kind=kind,
        dtype="float32",
        base_bytes=1e9,
        peak_bytes=1e9 + 5e7,
        seconds=list(seconds),
    )


def made_cell(
    seconds: Mapping[str, Sequence[float]],
    products: Mapping[str, Sequence[float]] | None = None,
    patches: int = 1000,
    name: str = "made",
) -> Cell:
    """1 GFLOP of work in the call and in the product; one round per sample."""
    num_rounds = len(next(iter(seconds.values())))
    ours = {each: made_entry(values) for each, values in seconds.items()}
    bare = {each: made_entry(values, "product") for each, values in (products or {}).items()}
    return Cell(
        workload=name,
        series="frames",
        grids=[[1, 10, 100]],
        patches=patches,
        operations=1e9,
        scores={"window": [4096.0, 4096.0], "full": [30.0, 20.0]},
        product_operations=1e9,
        rounds=[Round(order=list(ours), load=0.5, stolen_seconds=0.0)] * num_rounds,
        entries={**ours, **bare},
    )
