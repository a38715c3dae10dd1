"""Recorded requests with the decoder on a GPU, token for token."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.conftest import bundles
from tests.runtime.recorded import CHECKPOINT, TRUTHS, recorded
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.pipeline import load
from vlexport.runtime.speaking import RuntimeOptions

__all__ = ["bundles"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "compiled"])
def on_cuda(request: pytest.FixtureRequest, bundles):
    options = RuntimeOptions(decoder=DecoderOptions(device="cuda", compile=request.param, length=512))
    with load(bundles("eager"), decoder=CHECKPOINT, runtime=options) as pipeline:
        yield pipeline


@pytest.mark.parametrize("name", [case["name"] for case in TRUTHS])
def test_tokens_equal_the_recorded_ones_on_a_gpu(on_cuda, name):
    one = recorded(name)
    answer = on_cuda.generate(one.request)
    assert list(answer.token_ids) == one.case["token_ids"]
    assert answer.positions.tolist() == one.tensors["positions"].tolist()
