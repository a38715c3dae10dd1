"""A bundle in bfloat16 through the runtime: pixels arrive as float32 and are rounded once, at the engine."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from tests.runtime.recorded import CHECKPOINT
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport.checkpoint import Checkpoint
from vlexport.runtime.pipeline import load
from vlexport.runtime.request import Generation, Request

pytestmark = pytest.mark.slow


def test_a_bfloat16_bundle_encodes_prunes_and_answers(bundles, language, tmp_path):
    spec = request(Checkpoint.open(CHECKPOINT), backend="eager", dtype="bfloat16", into=tmp_path)
    path = build_checkpoint(spec).require_passed().path
    question = Request(
        raw_prompt=prompt(IMAGE, VIDEO, "what?"),
        images=[image(0)],
        videos=[video(1)],
        generation=Generation(max_new_tokens=2),
    )
    with load(bundles("eager")) as exact:
        (wanted,) = exact.encode(images=[image(0)])
    with load(path, decoder=language) as pipeline:
        (found,) = pipeline.encode(images=[image(0)])
        (kept,) = pipeline.encode(videos=[video(1)], prune=0.5)
        answer = pipeline.generate(question)
    gap = (found.embeds.float() - wanted.embeds).norm() / wanted.embeds.norm()
    assert found.embeds.dtype == torch.bfloat16
    assert 0 < float(gap) < spec.recipe.limits["bfloat16"].relative_l2
    assert kept.mask is not None
    assert len(kept.embeds) == int(kept.mask.sum()) < len(kept.mask)
    assert 1 <= len(answer.token_ids) <= 2
