"""Pruning and positions on a device: no wait for it, and the same choice inside a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from vlexport.positions.mrope import pruned_positions
from vlexport.positions.rules import PlacedMedia, PositionRule
from vlexport.pruning import evs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]

GRID, MERGE, WIDTH, RATE = (16, 32, 32), 2, 512, 0.75
FRAMES, PER_FRAME = GRID[0], GRID[1] * GRID[2] // MERGE**2


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any synchronisation with the device inside is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def embeddings(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A random walk over frames: neighbours are alike, and no two tokens equally so."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(FRAMES, PER_FRAME, WIDTH, generator=generator)
    strength = torch.rand(FRAMES, PER_FRAME, 1, generator=generator)
    return (steps * strength).cumsum(0).flatten(0, 1).to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pruning_and_positions_never_wait_for_the_device(dtype: torch.dtype) -> None:
    rows = embeddings(0, dtype)
    num_kept = evs.retained_count(PER_FRAME, FRAMES, RATE)
    media = [
        PlacedMedia(modality="video", offset=7, length=num_kept, grid=GRID, seconds_per_grid=1.0),
    ]
    rule = PositionRule(kind="time_scaled", merge=MERGE, tokens_per_second=2)
    evs.prune(rows, GRID, MERGE, RATE)
    with no_waiting():
        pruned = evs.prune(rows, GRID, MERGE, RATE)
        found = pruned_positions(num_kept + 20, media, [pruned.kept], rule)
    expected = pruned_positions(num_kept + 20, media, [pruned.kept.cpu()], rule)
    assert torch.equal(found.table_RN.cpu(), expected.table_RN)
    assert int(found.delta) == int(expected.delta)


def test_pruning_is_captured_once_and_replayed_on_other_embeddings() -> None:
    rows = embeddings(0, torch.bfloat16)
    evs.prune(rows, GRID, MERGE, RATE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = evs.prune(rows, GRID, MERGE, RATE)
    for seed in (1, 2):
        fresh = embeddings(seed, torch.bfloat16)
        rows.copy_(fresh)
        graph.replay()
        expected = evs.prune(fresh, GRID, MERGE, RATE)
        assert torch.equal(captured.kept, expected.kept)
        assert torch.equal(captured.embeds, expected.embeds)


def test_the_first_frame_stays_whole_and_the_order_is_kept() -> None:
    kept = evs.prune(embeddings(3, torch.float16), GRID, MERGE, RATE).kept
    assert kept[:PER_FRAME].tolist() == list(range(PER_FRAME))
    assert bool((kept.diff() > 0).all())
