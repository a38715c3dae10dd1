"""What is timed when the cost of pruning is measured, at a size that takes seconds."""

from __future__ import annotations

import pytest
import torch

from vlexport.bench import evs_cost, evs_share, pruning
from vlexport.bench.models import TowerSize
from vlexport.compiled.evs import retained_count

SMALL = TowerSize(depth=2, width=32, heads=2, inner=48, out=32, full_blocks=(1,))
GRID = (3, 8, 12)


@pytest.fixture(scope="module")
def shares():
    return evs_share.measure(2, 1, SMALL, (GRID,))


def test_a_share_is_of_rounds_of_tower_and_pruning(shares):
    (share,) = shares
    assert share.grid == GRID
    assert len(share.tower) == len(share.pruning) == 2
    assert share.share > 0
    assert "| 3 x 8 x 12 patches | 72 |" in evs_share.table(shares, 1)


def test_what_follows_the_tower_keeps_and_numbers_as_the_runtime_does():
    tokens_RD = torch.randn(72, 32, generator=torch.Generator().manual_seed(0))
    embeds, positions = evs_share.afterwards(GRID)(tokens_RD)
    kept = retained_count(24, 3, evs_share.RATE)
    assert embeds.shape == (kept, 32)
    assert positions.table_RN.shape == (3, kept + sum(evs_share.TEXT))


@pytest.mark.parametrize(("reads", "fine"), [(11.9, True), (12.1, False)])
def test_a_passed_limit_is_told(reads, fine):
    row = evs_cost.Row(contender="exact compiled", rate=0.5, ratio=reads, samples=(1.0,), limit=12.0)
    assert pruning.exceeded([row], []) is not fine
    assert f"| exact compiled | 0.50 | 1000.00 | {reads:.2f} | 12 |" in evs_cost.table([row], 1)


def test_a_share_above_the_limit_is_told():
    slow = evs_share.Share(grid=GRID, tower=(1.0, 1.0, 1.0), pruning=(0.001, 0.006, 0.007))
    assert pruning.exceeded([], [slow])
