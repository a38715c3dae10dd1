"""On a GPU: prune, positions and prefill start while the tower runs; the first token is the first wait."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_captured import captured_bundle
from tests.gpu.test_pruning import no_waiting
from tests.runtime.conftest import bundles
from tests.runtime.recorded import CHECKPOINT, recorded
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.pipeline import load
from vlexport.runtime.request import RequestState

__all__ = ["bundles"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]


@pytest.mark.parametrize("name", ["evs_q50_tall_fps1", "evs_image_then_video"])
def test_the_host_waits_for_nothing_between_tower_and_first_token(bundles, name: str) -> None:
    options = RuntimeOptions(
        decoder=DecoderOptions(device="cuda"), encoder=EncoderOptions(warm_up=True, cache_bytes=0)
    )
    with load(captured_bundle(bundles), decoder=CHECKPOINT, runtime=options) as pipeline:
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
