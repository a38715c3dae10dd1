"""The same tower with patches x patches masks, as an export without segments would have it.

N patches, H heads, D head width, R runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vlexport.graph import Graph


def with_dense_masks(graph: Graph) -> Graph:
    """The graph with every attention over all pairs of patches, those of other segments masked away."""
    program = graph.program.run_decompositions({torch.ops.vlexport.segment_attention.default: attend_densely})
    return replace(graph, program=program)


def attend_densely(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, runs_R2: Tensor, scale: float) -> Tensor:
    """Softmax over all N patches with minus infinity between segments."""
    segment_N = segment_ids(runs_R2, q_NHD.shape[0])
    apart_NN = segment_N[:, None] != segment_N[None, :]
    bias_NN = torch.zeros_like(apart_NN, dtype=q_NHD.dtype).masked_fill(apart_NN, float("-inf"))
    scores_HNN = torch.matmul(q_NHD.transpose(0, 1) * scale, k_NHD.permute(1, 2, 0)) + bias_NN
    return torch.matmul(scores_HNN.softmax(-1), v_NHD.transpose(0, 1)).transpose(0, 1).contiguous()


def segment_ids(runs_R2: Tensor, num_rows: int) -> Tensor:
    """A number for each row that it shares with the rows of its segment only."""
    runs = runs_R2.long()
    end_R = (runs[:, 0] * runs[:, 1]).cumsum(0)
    place_N = torch.arange(num_rows, device=runs.device)
    run_N = (place_N[:, None] >= end_R[None, :]).sum(-1)
    length_N = runs[:, 1].index_select(0, run_N)
    start_N = (end_R - runs[:, 0] * runs[:, 1]).index_select(0, run_N)
    return run_N * num_rows + (place_N - start_N) // length_N
