"""Attention over runs: equal to one segment at a time, and never more work than needed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vlexport.vision.attention.kernels import segment_attention
from vlexport.vision.attention.layout import scores, tables
from vlexport.vision.attention.segmentation import Segmentation, Segments

KIND = Segmentation(name="part")

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(torch.tensor)


@given(lengths)
@settings(max_examples=50, deadline=None)
def test_no_score_is_computed_that_is_not_needed(lengths_S: torch.Tensor) -> None:
    segments = Segments(order_M=torch.arange(int(lengths_S.sum())), lengths_S=lengths_S)
    made = tables("grouped", [KIND], {"part": segments}, 1)
    assert scores("grouped", [KIND], made, 1) == {"part": int((lengths_S**2).sum())}


def test_attention_stays_inside_each_segment() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3 * 4 + 2 * 7, 2, 8)
    runs = torch.tensor([[3, 4], [2, 7]], dtype=torch.int32)
    found = segment_attention(q, k, v, runs, 0.5)
    parts = [4, 4, 4, 7, 7]
    expected = []
    for rows in zip(q.split(parts), k.split(parts), v.split(parts), strict=True):
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in rows)
        expected.append(F.scaled_dot_product_attention(one_q, one_k, one_v, scale=0.5)[0].transpose(0, 1))
    # 1e-6: the same float32 kernel over other batch sizes.
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-6, rtol=0)


def test_runs_that_do_not_cover_the_rows_are_refused() -> None:
    rows = torch.zeros(8, 1, 4)
    with pytest.raises(ValueError, match="runs cover 6 rows, 8 given"):
        segment_attention(rows, rows, rows, torch.tensor([[2, 3]]), 1.0)
