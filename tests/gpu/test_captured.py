"""Captured graphs on a GPU: one capture a budget, the reference's rows, and answers with pruning on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.backends.towers import build_tower, random_calls, sharp_checkpoint
from tests.runtime.conftest import bundles
from tests.runtime.recorded import CHECKPOINT, recorded
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.pipeline import load
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
    with load(captured_bundle(bundles), decoder=CHECKPOINT, runtime=options) as pipeline:
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
    spec = request(source, backend="cudagraphs", dtype="bfloat16", into=into)
    return build_checkpoint(spec).require_passed().path
