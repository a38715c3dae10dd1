"""On a GPU: captured graphs and pruning in them, no wait before the first token, recorded requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.backends.towers import build_tower, random_calls, sharp_checkpoint
from tests.runtime.conftest import bundles
from tests.runtime.recorded import CHECKPOINT, TRUTHS, recorded
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.positions.mrope import pruned_positions
from vlexport.positions.rules import PlacedMedia, PositionRule
from vlexport.pruning import evs
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.pipeline import load
from vlexport.runtime.request import RequestState
from vlexport.specs import MediaItem

__all__ = ["bundles"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

# parity.md 5: the starting gate of bfloat16, against float32.
RELATIVE_L2, WORST_TOKEN = 0.15, 0.3


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captured")
    checkpoint = sharp_checkpoint(folder / "checkpoint")
    return build_tower(checkpoint, "cudagraphs", folder / "engine", dtype="bfloat16")


def tokens(tower, items: list[MediaItem]) -> torch.Tensor:
    config = tower.recipe.read_config(tower.checkpoint)
    inputs = tower.recipe.prepare(config, items, find_backend("cudagraphs").form)
    inputs["patches"] = inputs["patches"].bfloat16()
    found: torch.Tensor = tower.engine.run(inputs)["embeds"]
    return found


def mixes(tower, count: int) -> list[list[MediaItem]]:
    config = tower.recipe.read_config(tower.checkpoint)
    return random_calls(count, tower.recipe.row_width(config))


def test_replays_equal_the_reference_and_budgets_are_captured_once(tower) -> None:
    calls = tower.engine._runner.calls
    for _ in range(2):
        for items in mixes(tower, 20):
            found, expected = tokens(tower, items).cpu().float(), tower.reference(items)
            gap = found - expected
            assert float(gap.norm() / expected.norm()) < RELATIVE_L2
            assert float((gap.norm(dim=-1) / expected.norm(dim=-1)).max()) < WORST_TOKEN
    assert calls.num_replays == 40
    assert calls.num_as_they_are == 0
    assert len(calls.captured) <= len(calls.sizes)


def test_a_replay_gives_what_the_uncaptured_call_gives(tower) -> None:
    calls = tower.engine._runner.calls
    (items,) = mixes(tower, 1)
    captured = tokens(tower, items)
    sizes, calls.sizes = calls.sizes, []
    try:
        plain = tokens(tower, items)
    finally:
        calls.sizes = sizes
    torch.testing.assert_close(captured.float(), plain.float(), atol=0.05, rtol=0.02)


def test_a_replay_is_not_touched_by_the_next_one(tower) -> None:
    first, second = mixes(tower, 2)
    rows = tokens(tower, first)
    kept = rows.clone()
    tokens(tower, second)
    assert torch.equal(rows, kept)


@pytest.mark.parametrize("name", ["evs_q50_tall_fps1", "evs_image_then_video"])
def test_graphs_stay_on_with_pruning(bundles, name: str) -> None:
    options = RuntimeOptions(decoder=DecoderOptions(device="cuda"))
    one = recorded(name)
    with load(captured_bundle(bundles), checkpoint=CHECKPOINT, runtime=options) as pipeline:
        answer = pipeline.generate(one.request)
        assert pipeline.engine._runner.calls.num_replays == 1  # type: ignore[union-attr]
    # Half precision may choose other tokens; how many are kept, and where, it does not change.
    assert list(answer.kept) == one.case["retained"]
    assert list(answer.prompt_token_ids) == one.case["prompt_token_ids"]


def captured_bundle(bundles) -> Path:
    """The recorded checkpoint, whose stored dtype is float32, as a bfloat16 engine."""
    from vlexport._build.build import build_checkpoint
    from vlexport._build.request import request

    into = bundles("eager").parent
    source = Checkpoint.open(CHECKPOINT)
    spec = request(source, backend="cudagraphs", dtype="bfloat16", output_dir=into)
    return build_checkpoint(spec).require_passed().path


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
    num_kept = evs.EvsSelector().retained_count(PER_FRAME, FRAMES, RATE)
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


@pytest.mark.parametrize("name", ["evs_q50_tall_fps1", "evs_image_then_video"])
def test_the_host_waits_for_nothing_between_tower_and_first_token(bundles, name: str) -> None:
    options = RuntimeOptions(
        decoder=DecoderOptions(device="cuda"), encoder=EncoderOptions(warm_up=True, cache_bytes=0)
    )
    with load(captured_bundle(bundles), checkpoint=CHECKPOINT, runtime=options) as pipeline:
        steps = pipeline.require_generator()

        def fill():
            (state,) = steps.encode([steps.preprocess(recorded(name).request)])
            assert isinstance(state, RequestState)
            return steps.prefill(steps.embed(steps.prune(state)))

        # Libraries load and choose in their first calls.
        fill()
        with no_waiting():
            filled = fill()
        assert filled.logits.is_cuda
        assert pipeline.engine._runner.calls.num_replays == 2  # type: ignore[union-attr]


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "compiled"])
def on_cuda(request: pytest.FixtureRequest, bundles):
    if request.param and compiler() is None:
        pytest.skip("a compiled decoder needs a C compiler for Triton: gcc or clang, or CC")
    options = RuntimeOptions(decoder=DecoderOptions(device="cuda", compile=request.param, length=512))
    with load(bundles("eager"), checkpoint=CHECKPOINT, runtime=options) as pipeline:
        yield pipeline


@pytest.mark.parametrize("name", [case["name"] for case in TRUTHS])
def test_tokens_equal_the_recorded_ones_on_a_gpu(on_cuda, name):
    one = recorded(name)
    answer = on_cuda.generate(one.request)
    assert list(answer.token_ids) == one.case["token_ids"]
    assert answer.positions.tolist() == one.tensors["positions"].tolist()
