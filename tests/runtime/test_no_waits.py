"""From the tower to prefill no stage reads a number back from the device.

Tensors of the meta device hold no numbers, so a stage that reads one (`.item()`, `.tolist()`, a mask as an
index, a copy to the host) raises here. The same stages run on a GPU in tests/gpu/test_no_waits.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.recorded import recorded
from vlexport._build.token_graphs import eager_graphs
from vlexport.positions.plan import write_kept_positions
from vlexport.pruning.evs import EVS
from vlexport.pruning.selectors import Selection
from vlexport.runtime.decoder import DecoderOptions, TransformersDecoder
from vlexport.runtime.generate import AnswerGenerator, RuntimeOptions
from vlexport.runtime.request import RequestState


@pytest.fixture(scope="module")
def steps(opened, language) -> AnswerGenerator:
    """The stages with the decoder on the meta device."""
    model = copy.deepcopy(language.decoder.model).to("meta")
    decoder = TransformersDecoder(model, DecoderOptions())
    on_meta = replace(language, decoder=decoder)
    return AnswerGenerator(opened.encoder, opened.pruner, on_meta, RuntimeOptions())


def test_stages_after_the_tower_read_nothing_back(steps: AnswerGenerator) -> None:
    for name in ("evs_q50_tall_fps1", "evs_image_then_video", "evs_chunked_q50", "two_images"):
        (state,) = steps.encode([steps.preprocess(recorded(name).request)])
        assert isinstance(state, RequestState)
        state.encoded = tuple(replace(each, embeds=each.embeds.to("meta")) for each in state.encoded)
        steps.prefill(steps.embed(steps.prune(state)))
        assert (state.embeds.is_meta, state.logits.is_meta) == (True, True), name
        assert len(state.embeds) == len(recorded(name).case["prompt_token_ids"]), name


def test_compiled_graphs_stand_between_tower_and_prefill_without_a_wait(steps: AnswerGenerator) -> None:
    """Packages of a GPU, in whose place the same programs run on the meta device and are counted."""
    plain, calls = steps.pruner.graphs, list[str]()

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(name)
            return run(*given)

        return call

    graphs = replace(
        eager_graphs("evs"),
        selection=Selection(selector=plain.selection.selector, run=counted("prune", EVS.run)),
        form="compiled",
        dtype="float32",
        device="meta",
        packaged_kept=counted("kept", write_kept_positions),
    )
    embedder = steps.embedder
    steps.pruner.graphs, steps.embedder = graphs, replace(embedder, graphs=graphs)
    try:
        (state,) = steps.encode([steps.preprocess(recorded("evs_image_then_video").request)])
        assert isinstance(state, RequestState)
        state.encoded = tuple(replace(each, embeds=each.embeds.to("meta")) for each in state.encoded)
        steps.prefill(steps.embed(steps.prune(state)))
    finally:
        steps.pruner.graphs, steps.embedder = plain, embedder
    assert calls == ["prune", "kept"]
    assert state.forms == {"prune": "compiled", "positions": "compiled"}


def test_the_meta_device_notices_a_number_that_is_read() -> None:
    with pytest.raises(NotImplementedError, match="meta tensor"):
        torch.zeros(3, device="meta").tolist()
