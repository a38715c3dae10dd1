"""Attention across segments: queries of each segment see its own keys and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vlexport.vision.attention.kernels import segment_cross_attention

runs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=5)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=0.5)[0].transpose(0, 1)


@given(runs)
@settings(max_examples=60, deadline=None)
def test_each_segment_attends_as_if_it_were_alone(sizes: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(0)
    asked = [queries for count, queries, _ in sizes for _ in range(count)]
    seen = [keys for count, _, keys in sizes for _ in range(count)]
    q = torch.randn(sum(asked), 2, 4)
    k, v = torch.randn(2, sum(seen), 2, 4)
    found = segment_cross_attention(q, k, v, torch.tensor(sizes, dtype=torch.int32), 0.5)
    expected = [alone(*rows) for rows in zip(q.split(asked), k.split(seen), v.split(seen), strict=True)]
    # 1e-6: the same float32 kernel over other batch sizes.
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-6, rtol=0)


def test_runs_that_do_not_cover_the_rows_are_refused() -> None:
    rows = torch.zeros(8, 1, 4)
    with pytest.raises(ValueError, match="runs cover 4 query and 6 key rows, 8 and 8 given"):
        segment_cross_attention(rows, rows, rows, torch.tensor([[2, 2, 3]]), 1.0)


def test_the_traced_operator_has_the_shape_and_type_of_the_queries() -> None:
    q, k = torch.randn(6, 2, 4), torch.randn(10, 2, 4)
    arguments = (q, k, k, torch.tensor([[2, 3, 5]], dtype=torch.int32), 0.5)
    torch.library.opcheck(segment_cross_attention, arguments, test_utils=("test_schema", "test_faketensor"))
