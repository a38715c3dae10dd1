"""What `plan` says against real builds and calls in processes of their own: within 30 %."""

from __future__ import annotations

import pytest

from vlexport.bench.footprint import SIDES, SIZES, Case, foretold, measured, pairs_here, worst_share
from vlexport.bench.models import TowerSize, contents_of, default_recipe, write_tower
from vlexport.forecast import forecast

SMALL = TowerSize(depth=2, width=160, heads=2, inner=432, out=128, full_blocks=(1,))
# The bound; docs/memory.md has what was measured.
SHARE = 0.3


def compare(folder, size, side, backend, precision):
    source = write_tower(folder / "tower", contents_of(default_recipe(), size))
    into = str(folder / "engines")
    case = Case(source=str(source), backend=backend, precision=precision, side=side, into=into)
    told, real = foretold(forecast(case.asked())), measured(case)
    assert worst_share(told, real) < SHARE, (told, real)


def test_a_small_tower_takes_what_was_said(tmp_path):
    compare(tmp_path, SMALL, 32, "onnxruntime", "float32")


@pytest.mark.full
@pytest.mark.parametrize(("backend", "precision"), pairs_here())
@pytest.mark.parametrize("name", SIZES)
def test_towers_of_three_sizes_take_what_was_said(tmp_path, name, backend, precision):
    compare(tmp_path, SIZES[name], SIDES[name], backend, precision)
