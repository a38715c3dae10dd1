"""Window order, frames, positions against recorded metadata; tests/reference has random calls."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from tests.golden_data import Case, cases
from vlexport.errors import InputError
from vlexport.vision import grid, rotary
from vlexport.vision.attention.segmentation import inverse


def recorded(kind: str) -> list[Case]:
    found = list(cases("q25_metadata", kind))
    assert len(found) >= 24
    return found


def side(meta: dict[str, int]) -> int:
    return meta["window_size"] // meta["merge"] // meta["patch"]


def deduplicated(boundaries: torch.Tensor) -> list[int]:
    found: list[int] = boundaries.unique_consecutive().tolist()
    return found


def test_window_order_and_lengths_equal_the_recorded_ones() -> None:
    for case in recorded("window"):
        found = grid.windows(torch.tensor([case.meta["thw"]]), case.meta["merge"], side(case.meta))
        unit = case.meta["merge"] ** 2
        assert found.order_M.tolist() == case.outputs["window_index"].tolist(), case.meta
        assert (found.lengths_S.cumsum(0) * unit).tolist() == case.outputs["cu_window"].tolist(), case.meta


def test_tables_of_several_items_equal_the_recorded_ones() -> None:
    for case in recorded("metadata"):
        grids_I3, merge = torch.tensor(case.meta["grids"]), case.meta["merge"]
        found = grid.windows(grids_I3, merge, side(case.meta))
        unit = merge**2
        assert found.order_M.tolist() == case.outputs["window_index"].tolist(), case.meta
        assert inverse(found.order_M).tolist() == case.outputs["reverse_indices"].tolist(), case.meta
        windows = F.pad((found.lengths_S * unit).cumsum(0), (1, 0))
        assert windows.tolist() == deduplicated(case.outputs["cu_window_seqlens"]), case.meta
        frames = F.pad((grid.frames(grids_I3, merge).lengths_S * unit).cumsum(0), (1, 0))
        assert frames.tolist() == deduplicated(case.outputs["cu_seqlens"]), case.meta


def test_rotary_tables_equal_the_recorded_ones() -> None:
    found = [case for case in recorded("metadata") if "rotary_pos_emb_cos" in case.outputs]
    assert len(found) == 11
    for case in found:
        grids_I3, merge = torch.tensor(case.meta["grids"]), case.meta["merge"]
        order = grid.windows(grids_I3, merge, side(case.meta)).order_M
        frequencies = rotary.inverse_frequencies(case.meta["head_dim"], 10000.0)
        angles = rotary.angles(grid.patch_positions(grids_I3, merge), frequencies)
        angles = angles.unflatten(0, (-1, merge**2))[order].flatten(0, 1)
        # 1e-6: the recorded tables are looked up, ours are computed; both in float32.
        torch.testing.assert_close(angles.cos(), case.outputs["rotary_pos_emb_cos"], atol=1e-6, rtol=0)
        torch.testing.assert_close(angles.sin(), case.outputs["rotary_pos_emb_sin"], atol=1e-6, rtol=0)


def test_grids_that_no_tower_can_serve_are_refused() -> None:
    odd = "rows and columns must be multiples of the merge size 2; resize to [1, 4, 6]"
    shape = "integers of shape [items, 3] expected"
    for grids_I3, message in (
        (torch.tensor([[1, 4, 5]]), odd),
        (torch.tensor([[0, 4, 4]]), "every side must be at least 1"),
        (torch.tensor([[1.0, 4.0, 4.0]]), shape),
        (torch.tensor([1, 4, 4]), shape),
        (torch.zeros(0, 3, dtype=torch.int64), "no image or video given"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            grid.check_grids(grids_I3, 2)
