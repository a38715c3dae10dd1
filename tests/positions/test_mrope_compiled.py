"""The position programs compile whole: one graph for all sizes, the same numbers.

`fullgraph` raises at a graph break and at every value read back from the device.
"""

import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from vlexport.integrations.vllm.expanded import expanded_video, write_layout
from vlexport.integrations.vllm.packed_embeds import PositionedRows
from vlexport.integrations.vllm.pruner import MultiModalPruner, PrefillRequest
from vlexport.positions.media import pruned_channels
from vlexport.positions.mrope import pruned_positions, recompute_positions
from vlexport.positions.plan import write_kept_positions, write_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionOptions, PositionRule
from vlexport.positions.splice import Placeholder

TIMED = PositionRule(kind="time_scaled", tokens_per_second=2)
WRITTEN = PositionRule(kind="time_as_text", markers=FrameMarkers(vision_start=7, vision_end=8, video=6))
NUM_SHAPES = 60
# With sizes of 2 and more, and with sizes of 1 among them. A first call whose sizes happen to coincide
# costs one compilation more, and so does each size of 1.
SMALLEST_AND_MOST = [(2, 2), (1, 5)]


def random_prompt(rng, smallest):
    """Length, media and kept indices of a prompt whose sizes are all at least `smallest`."""
    media, kept, at = [], [], rng.randint(smallest - 1, 9)
    for _ in range(rng.randint(smallest, 6)):
        grid = (rng.randint(smallest, 6), 2 * rng.randint(smallest, 7), 2 * rng.randint(smallest, 7))
        tokens = grid[0] * grid[1] * grid[2] // 4
        kept.append(torch.tensor(sorted(rng.sample(range(tokens), rng.randint(smallest, tokens)))))
        length = kept[-1].shape[0]
        media.append(PlacedMedia(modality="video", offset=at, length=length, grid=grid, seconds_per_grid=1.0))
        at += length + rng.randint(0, 9)
    return max(at, smallest), media, kept


def compiled(program, backend="aot_eager"):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return counter, torch.compile(program, fullgraph=True, dynamic=True, backend=counter)


@pytest.mark.parametrize(("smallest", "most"), SMALLEST_AND_MOST)
@pytest.mark.parametrize("resume", ["reference", "max"])
def test_positions_from_blocks_compile_at_most_twice(smallest, most, resume):
    rng, options = random.Random(1), PositionOptions(pruned_resume=resume)
    counter, write = compiled(write_positions)
    for _ in range(NUM_SHAPES):
        length, media, kept = random_prompt(rng, smallest)
        blocks = [pruned_channels(*pair) for pair in zip(media, [TIMED] * len(media), kept, strict=True)]
        offsets = [item.offset for item in media]
        ours = recompute_positions(length, offsets, blocks, options, write=write)
        plain = recompute_positions(length, offsets, blocks, options)
        assert torch.equal(ours.table_RN, plain.table_RN)
    assert 1 <= counter.frame_count <= most


@pytest.mark.parametrize(("smallest", "most"), SMALLEST_AND_MOST)
def test_positions_from_kept_indices_compile_at_most_twice(smallest, most):
    rng = random.Random(2)
    counter, write = compiled(write_kept_positions)
    for _ in range(NUM_SHAPES):
        length, media, kept = random_prompt(rng, smallest)
        ours = pruned_positions(length, media, kept, TIMED, write=write)
        plain = pruned_positions(length, media, kept, TIMED)
        assert torch.equal(ours.table_RN, plain.table_RN)
        assert torch.equal(ours.delta, plain.delta)
    assert 1 <= counter.frame_count <= most


@pytest.mark.parametrize(("smallest", "most"), SMALLEST_AND_MOST)
def test_prefill_chunks_compile_at_most_twice(smallest, most):
    rng = random.Random(3)
    counter, write = compiled(write_positions)
    for _ in range(NUM_SHAPES):
        length, media, kept = random_prompt(rng, smallest)
        first = media[0]
        computed = rng.randint(first.offset, first.offset + first.length - 1)
        blocks = [pruned_channels(*pair) for pair in zip(media, [TIMED] * len(media), kept, strict=True)]
        blocks[0] = blocks[0][:, computed - first.offset :]
        entries = [
            PositionedRows(embeds_KD=torch.ones(block.shape[1], 2), channels_CK=block) for block in blocks
        ]
        request = PrefillRequest(
            placeholders=tuple(Placeholder(offset=item.offset, length=item.length) for item in media),
            positions_3N=torch.arange(length).expand(3, -1),
            num_computed=computed,
            num_scheduled=length,
        )
        ours = MultiModalPruner(hidden=2, write=write).recompute(entries, [request])
        plain = MultiModalPruner(hidden=2).recompute(entries, [request])
        (ours_here,), (plain_here,) = ours.positions, plain.positions
        assert ours_here is not None
        assert plain_here is not None
        assert torch.equal(ours_here.table_RN, plain_here.table_RN)
    assert 1 <= counter.frame_count <= most


@pytest.mark.parametrize(("smallest", "most"), SMALLEST_AND_MOST)
def test_expanded_layouts_compile_at_most_twice(smallest, most):
    rng = random.Random(4)
    counter, write = compiled(write_layout)
    for _ in range(NUM_SHAPES):
        _, media, kept = random_prompt(rng, smallest)
        stamps = [[200] * rng.randint(1, 4) for _ in range(media[0].grid[0])]
        ours = expanded_video(kept[0], media[0].grid, stamps, WRITTEN, write=write)
        plain = expanded_video(kept[0], media[0].grid, stamps, WRITTEN)
        assert torch.equal(ours.channels_5L, plain.channels_5L)
        assert torch.equal(ours.ids_L, plain.ids_L)
    assert 1 <= counter.frame_count <= most


@pytest.mark.slow
def test_native_code_gives_the_same_integers():
    rng = random.Random(5)
    counter, write = compiled(write_kept_positions, "inductor")
    for _ in range(NUM_SHAPES):
        length, media, kept = random_prompt(rng, 2)
        ours = pruned_positions(length, media, kept, TIMED, write=write)
        plain = pruned_positions(length, media, kept, TIMED)
        assert torch.equal(ours.table_RN, plain.table_RN)
        assert torch.equal(ours.delta, plain.delta)
    assert 1 <= counter.frame_count <= 2
