"""What is timed when the cost of pruning is measured, at a size that takes seconds."""

from __future__ import annotations

import pytest
import torch

from benchmarks import pruning
from benchmarks.towers import TowerSize
from vlexport.pruning.evs import retained_count

pytestmark = pytest.mark.slow

SMALL = TowerSize(depth=2, width=32, heads=2, inner=48, out=32, full_blocks=(1,))
GRID = (3, 8, 12)
OPENED = {"compiled": [2.5, 2.75], "eager": [2.25, 2.25]}


def test_a_share_is_of_rounds_of_tower_and_pruning():
    found = pruning.shares(2, 1, SMALL, (GRID,))
    tower, after = found[GRID]
    assert len(tower.samples) == len(after.samples) == 2
    assert after.ratio > 0
    assert (tower.limit, after.limit) == (None, pruning.SHARE_LIMIT)
    assert "| 3 x 8 x 12 patches | 72 |" in pruning.page([], found, OPENED, 1)


def test_what_follows_the_tower_keeps_and_numbers_as_the_runtime_does():
    tokens_RD = torch.randn(72, 32, generator=torch.Generator().manual_seed(0))
    embeds, positions = pruning.afterwards(GRID)(tokens_RD)
    kept = retained_count(24, 3, pruning.RATE)
    assert embeds.shape == (kept, 32)
    assert positions.table_RN.shape == (3, kept + sum(pruning.TEXT))


@pytest.mark.parametrize(("reads", "is_exceeded"), [(11.9, False), (12.1, True)])
def test_a_limit_is_shown_and_checked(reads, is_exceeded):
    rows = pruning.rows_of({"read": [1.0, 1.0], "exact compiled": [reads, reads]}, 0.5, pruning.LIMITS)
    assert rows[1].is_exceeded is is_exceeded
    assert f"| exact compiled | 0.50 | {reads * 1e3:.2f} | {reads:.2f} | 12 |" in pruning.page(
        rows, {}, OPENED, 1
    )
