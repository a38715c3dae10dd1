"""Attention over runs: equal to one segment at a time, and never more work than needed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vlexport.vision.attention.kernels import segment_attention, segment_cross_attention
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


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=0.5)[0].transpose(0, 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_each_segment_attends_as_if_it_were_alone(sizes: list[tuple[int, int, int]]) -> None:
    """Rows among themselves, and rows to keys of their own."""
    torch.manual_seed(0)
    num_queries = [queries for count, queries, _ in sizes for _ in range(count)]
    seen = [keys for count, _, keys in sizes for _ in range(count)]
    q = torch.randn(sum(num_queries), 2, 4)
    own, (k, v) = torch.randn(2, sum(num_queries), 2, 4), torch.randn(2, sum(seen), 2, 4)
    runs = torch.tensor(sizes, dtype=torch.int32)
    found = segment_cross_attention(q, k, v, runs, 0.5)
    expected = [alone(*rows) for rows in zip(q.split(num_queries), k.split(seen), v.split(seen), strict=True)]
    # 1e-6: the same float32 kernel over other batch sizes.
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-6, rtol=0)
    found = segment_attention(q, *own, runs[:, :2], 0.5)
    expected = [alone(*rows) for rows in zip(*(each.split(num_queries) for each in (q, *own)), strict=True)]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-6, rtol=0)


def test_runs_that_do_not_cover_the_rows_are_refused() -> None:
    rows = torch.zeros(8, 1, 4)
    with pytest.raises(ValueError, match="runs cover 6 query and 6 key rows, 8 and 8 given"):
        segment_attention(rows, rows, rows, torch.tensor([[2, 3]]), 1.0)
    with pytest.raises(ValueError, match="runs cover 4 query and 6 key rows, 8 and 8 given"):
        segment_cross_attention(rows, rows, rows, torch.tensor([[2, 2, 3]]), 1.0)


def test_the_traced_operator_has_the_shape_and_type_of_the_queries() -> None:
    q, k = torch.randn(6, 2, 4), torch.randn(10, 2, 4)
    arguments = (q, k, k, torch.tensor([[2, 3, 5]], dtype=torch.int32), 0.5)
    torch.library.opcheck(segment_cross_attention, arguments, test_utils=("test_schema", "test_faketensor"))
