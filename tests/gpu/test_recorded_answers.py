"""Recorded requests with the decoder on a GPU, token for token."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from tests.runtime.conftest import bundles
from tests.runtime.recorded import CHECKPOINT, TRUTHS, recorded
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.pipeline import load

__all__ = ["bundles"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def compiler() -> str | None:
    """Return the C compiler that Triton builds its launcher with, or None."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "compiled"])
def on_cuda(request: pytest.FixtureRequest, bundles):
    if request.param and compiler() is None:
        pytest.skip("a compiled decoder needs a C compiler for Triton: gcc or clang, or CC")
    options = RuntimeOptions(decoder=DecoderOptions(device="cuda", compile=request.param, length=512))
    with load(bundles("eager"), decoder=CHECKPOINT, runtime=options) as pipeline:
        yield pipeline


@pytest.mark.parametrize("name", [case["name"] for case in TRUTHS])
def test_tokens_equal_the_recorded_ones_on_a_gpu(on_cuda, name):
    one = recorded(name)
    answer = on_cuda.generate(one.request)
    assert list(answer.token_ids) == one.case["token_ids"]
    assert answer.positions.tolist() == one.tensors["positions"].tolist()
