"""Towers of released sizes fit the machine: minutes, gigabytes of disk, and all its cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.full_size import Cell, cells, measure

# The machine that it must fit; what was measured stands in docs/full_size.md.
MEMORY = 24 * 2**30
EXACT = [cell for cell in cells() if cell.precision == "float32"]


@pytest.mark.full
@pytest.mark.parametrize("cell", EXACT, ids=lambda cell: cell.name)
def test_a_tower_of_released_size_is_built_checked_and_run(cell: Cell, tmp_path: Path) -> None:
    found = measure(tmp_path, cell)
    assert (found["build"]["code"], found["status"], found["encode"]["code"]) == (0, "passed", 0), found
    assert max(found["build"]["peak"], found["encode"]["peak"]) < MEMORY


def test_every_backend_that_needs_no_gpu_is_measured_in_every_precision_on_both_towers() -> None:
    names = {cell.name for cell in cells()}
    assert {
        "3B onnxruntime float32",
        "7B onnxruntime float32",
        "3B onnxruntime int8",
        "3B eager bfloat16",
    } <= names
    assert len(names) % 2 == 0
