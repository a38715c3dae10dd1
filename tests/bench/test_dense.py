"""The dense contender computes the same attention, only over all pairs."""

import torch

import vlexport.bench.dense as dense
from vlexport.vision.segments import segment_attention

RUNS = torch.tensor([[2, 3], [1, 4], [3, 5]], dtype=torch.int32)


def test_rows_share_a_number_with_the_rows_of_their_segment_only():
    ids = dense.segment_ids(RUNS, 25)
    lengths = ids.unique_consecutive(return_counts=True)[1]
    assert lengths.tolist() == [3, 3, 4, 5, 5, 5]
    assert len(ids.unique()) == 6


def test_dense_masks_give_what_segments_give():
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(25, 2, 8, generator=source) for _ in range(3))
    found, expected = dense.attend_densely(q, k, v, RUNS, 0.3), segment_attention(q, k, v, RUNS, 0.3)
    # 4.8e-7 measured: both are float32 softmax attention of 25 rows, summed in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
