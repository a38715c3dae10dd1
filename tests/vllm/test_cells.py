"""Pruning before the tower inside vLLM: prompts, positions and tokens are those of `generate` outside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import vlexport
from tests.golden_data import FOLDER
from tests.vllm.test_pruned import WORDS, positions, request

CASES = {
    "page": ("image", "predicted"),
    "scan": ("image", "contrast:0.5"),
    "photograph": ("photograph", "predicted"),
    "clip": ("video", "static:0.5"),
    "clip, page": ("video image", "predicted"),
    "page, clip": ("image video", "static-frames:0.7"),
    "two clips": ("video video", "delta:0.4"),
    "whole": ("image video", None),
}
JOBS = [("e2e", None), ("e2e", 24), ("e2e_qwen2_vl", None), ("e2e_qwen3_vl", None), ("e2e_qwen3_vl", 19)]
E2E = FOLDER / "e2e" / "checkpoint"


def allowed(choice: str | None = None) -> dict:
    return {"mm_processor_kwargs": {"prune_before": choice}, "max_model_len": 1024}


def made(kind: str, random: torch.Generator) -> torch.Tensor:
    """A page with print in a corner, noise, or a still film of which a corner moves."""
    if kind == "photograph":
        return torch.randint(0, 256, (112, 112, 3), dtype=torch.uint8, generator=random)
    frames = torch.full((112, 224, 3), 240, dtype=torch.uint8)
    if kind == "video":
        frames = torch.randint(0, 256, (1, 112, 112, 3), dtype=torch.uint8, generator=random)
        frames = frames.repeat(8, 1, 1, 1)
    corner = frames[..., 20:70, 30:100, :]
    corner[:] = torch.randint(0, 256, corner.shape, dtype=torch.uint8, generator=random)
    return frames


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place: Path = tmp_path_factory.mktemp("cells")
    found = []
    for seed, (name, (mix, choice)) in enumerate(CASES.items()):
        random, file = torch.Generator().manual_seed(seed), f"{seed}.safetensors"
        raw = {f"media{at}.raw": made(kind, random) for at, kind in enumerate(mix.split())}
        save_file(raw, place / file)
        kinds = mix.replace("photograph", "image").split()
        media = [{"kind": kind, "fps": 2.0 if kind == "video" else None} for kind in kinds]
        text = " then ".join(WORDS[kind] for kind in kinds)
        prompt = f"<|im_start|>user\n{text} describe<|im_end|>\n<|im_start|>assistant\n"
        case = {"name": name, "prompt": prompt, "media": media, "prune_before": choice, "file": file}
        found.append({**case, "q": 0.0, "embeds": False, "chunk_budget": None})
    (place / "cases.json").write_text(json.dumps(found))
    return place


@pytest.mark.parametrize(("name", "chunk"), JOBS)
def test_prompts_positions_and_tokens_are_those_outside_vllm(answers, bundle, folder, name, chunk):
    checkpoint, options = FOLDER / name / "checkpoint", allowed()
    options |= {"max_num_batched_tokens": chunk, "enable_chunked_prefill": True} if chunk else {}
    found = answers(folder, [*CASES], bundle(checkpoint), checkpoint=checkpoint, **options)
    with vlexport.load(bundle(checkpoint), checkpoint=checkpoint) as pipeline:
        for case in json.loads((folder / "cases.json").read_text()):
            asked = replace(request(folder, case, 0.0), prune_before=case["prune_before"])
            answer, each = pipeline.generate(asked), case["name"]
            assert found["prompts"][each] == list(answer.prompt_token_ids), each
            assert found["positions"][each] == positions(answer), each
            assert found["tokens"][each] == list(answer.token_ids), each


def test_a_servers_own_choice_gives_the_same_tokens_from_cached_blocks(answers, bundle, folder):
    """Requests name none; the second time neither processor nor tower runs."""
    caches = {"enable_prefix_caching": True, "mm_processor_cache_gb": 1, "block_size": 32}
    options = {"checkpoint": E2E, **allowed("predicted"), **caches}
    found = answers(folder, ["whole", "whole"], bundle(E2E), **options)
    (case,) = (case for case in json.loads((folder / "cases.json").read_text()) if case["name"] == "whole")
    with vlexport.load(bundle(E2E), checkpoint=E2E) as pipeline:
        answer = pipeline.generate(replace(request(folder, case, 0.0), prune_before="predicted"))
    assert found["prompts"]["whole"] == list(answer.prompt_token_ids)
    assert found["tokens"]["whole"] == list(answer.token_ids)
    assert found["calls"] == 2


def test_a_request_is_refused_a_choice_that_its_server_has_not_allowed(answers, bundle, folder):
    with pytest.raises(AssertionError, match=r"ValueError: .*given by a request, and not by the server"):
        answers(folder, ["page"], bundle(E2E), checkpoint=E2E)
    with pytest.raises(AssertionError, match="InputError: prune_before: 'dim' given"):
        answers(folder, ["page"], bundle(E2E), checkpoint=E2E, **allowed("dim"))
