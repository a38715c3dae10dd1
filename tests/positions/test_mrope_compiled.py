"""The position programs compile whole: one graph for all sizes, the same numbers.

`fullgraph` raises at a graph break and at every value read back from the device.
"""

import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.positions.blocks import recompute_positions
from vlexport.positions.media import pruned_channels
from vlexport.positions.mrope import pruned_positions
from vlexport.positions.plan import write_kept_positions, write_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionOptions, PositionRule

TIMED = PositionRule(kind="time_scaled", tokens_per_second=2)
WRITTEN = PositionRule(kind="time_as_text", markers=FrameMarkers(vision_start=7, vision_end=8, video=6))
NUM_SHAPES = 60


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


def blocks_of(media, kept):
    return [pruned_channels(*pair) for pair in zip(media, [TIMED] * len(media), kept, strict=True)]


def from_blocks(resume):
    def positions(rng, smallest):
        length, media, kept = random_prompt(rng, smallest)
        offsets, options = [item.offset for item in media], PositionOptions(pruned_resume=resume)
        blocks = blocks_of(media, kept)
        return lambda **how: [recompute_positions(length, offsets, blocks, options, **how).table_RN]

    return positions


def from_kept_indices(rng, smallest):
    length, media, kept = random_prompt(rng, smallest)

    def positions(**how):
        found = pruned_positions(length, media, kept, TIMED, **how)
        return [found.table_RN, found.delta]

    return positions


PROGRAMS = {
    "blocks, reference": (write_positions, from_blocks("reference")),
    "blocks, max": (write_positions, from_blocks("max")),
    "kept indices": (write_kept_positions, from_kept_indices),
}


def check_compiled(name, smallest, most, backend="aot_eager"):
    program, draw = PROGRAMS[name]
    rng = random.Random(name)
    counter, write = compiled(program, backend)
    for _ in range(NUM_SHAPES):
        positions = draw(rng, smallest)
        for ours, plain in zip(positions(write=write), positions(), strict=True):
            assert torch.equal(ours, plain)
    assert 1 <= counter.frame_count <= most


# With sizes of 2 and more, and with sizes of 1 among them. A first call whose sizes happen to coincide
# costs one compilation more, and so does each size of 1.
@pytest.mark.parametrize("name", PROGRAMS)
def test_positions_compile_at_most_twice_and_a_few_times_with_sizes_of_1(name):
    check_compiled(name, 2, 2)
    check_compiled(name, 1, 5)


@pytest.mark.slow
def test_native_code_gives_the_same_integers():
    check_compiled("kept indices", 2, 2, "inductor")
