"""Pruned requests that stock vLLM gets wrong: several media, chunks that end anywhere, short questions.

vLLM cannot say what is right there. The runtime can, outside vLLM: its tokens and positions are held to
recorded ones and to the plain rule, token by token, in tests/runtime and tests/recipes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vlexport
from tests.golden_data import FOLDER
from tests.vllm.test_plugin import cases
from tests.vllm.test_server import recorded
from vlexport.runtime.outputs import Answer
from vlexport.runtime.request import Generation, Request
from vlexport.specs import Pixels

WORDS = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
# Sides are multiples of the merged cells of both checkpoints.
SIZES: dict[str, list[list[int]]] = {
    "image": [[112, 224, 3], [224, 112, 3]],
    "video": [[10, 112, 112, 3], [7, 112, 224, 3]],
}
MIXES = {
    "two videos": "video video",
    "video, image, video": "video image video",
    "image, video, image": "image video image",
    "side by side": "video+image",
}
JOBS = [
    ("e2e", 0.5, None),
    ("e2e", 0.5, 24),
    ("e2e", 0.6, None),
    ("e2e_qwen3_vl", 0.5, None),
    ("e2e_qwen3_vl", 0.5, 19),
]


def made(name: str, mix: str) -> dict[str, Any]:
    """A request with these media, text between them or not."""
    taken = {kind: iter(sizes) for kind, sizes in SIZES.items()}
    kinds = mix.replace("+", " ").split()
    rates = iter((2.0, 1.0))
    media = [
        {"kind": kind, "shape": next(taken[kind]), "fps": next(rates) if kind == "video" else None}
        for kind in kinds
    ]
    text = " then ".join("".join(WORDS[kind] for kind in part.split("+")) for part in mix.split())
    prompt = f"<|im_start|>user\n{text} compare them<|im_end|>\n<|im_start|>assistant\n"
    return {"name": name, "prompt": prompt, "media": media, "q": 0.5}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the requests of a checkpoint: those without truth, and made ones, with pixels of their own."""
    folders: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name in folders:
            return folders[name]
        folder = folders[name] = tmp_path_factory.mktemp(name)
        found = []
        for seed, case in enumerate([*cases(name, truth=False), *(made(*pair) for pair in MIXES.items())]):
            random = torch.Generator().manual_seed(seed)
            raw = {
                f"media{at}.raw": torch.randint(0, 256, about["shape"], dtype=torch.uint8, generator=random)
                for at, about in enumerate(case["media"])
            }
            file = f"{seed}.safetensors"
            save_file(raw, folder / file)
            found.append({**case, "file": file, "embeds": False, "chunk_budget": None})
        (folder / "cases.json").write_text(json.dumps(found))
        return folder

    return write


@pytest.fixture(scope="module")
def answered(bundle: Callable[..., Path], written: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    pipelines: dict[str, vlexport.Pipeline] = {}

    def answer(name: str, rate: float) -> dict[str, Answer]:
        checkpoint = FOLDER / name / "checkpoint"
        if name not in pipelines:
            pipelines[name] = vlexport.load(bundle(checkpoint), checkpoint=checkpoint)
        folder = written(name)
        asked = {case["name"]: case for case in json.loads((folder / "cases.json").read_text())}
        return {
            each: pipelines[name].generate(request(folder, case, rate))
            for each, case in asked.items()
            if case["q"] == rate
        }

    yield answer
    for pipeline in pipelines.values():
        pipeline.close()


def request(folder: Path, case: dict[str, Any], rate: float) -> Request:
    raw = load_file(folder / case["file"])
    media: dict[str, list[Pixels]] = {"image": [], "video": []}
    for at, about in enumerate(case["media"]):
        frames = raw[f"media{at}.raw"]
        frames = frames if frames.ndim == 4 else frames[None]
        media[about["kind"]].append(Pixels(kind=about["kind"], frames=frames, frames_per_second=about["fps"]))
    return Request(
        raw_prompt=case["prompt"],
        images=media["image"],
        videos=media["video"],
        prune=rate,
        generation=Generation(max_new_tokens=32, ignore_end=False),
    )


def positions(answer: Answer) -> list[list[int]]:
    """Those of the prompt, and of every token after it but the last, which is fed to nothing."""
    first = len(answer.prompt_token_ids) + answer.delta
    decoded = torch.arange(first, first + len(answer.token_ids) - 1).expand(3, -1)
    found: list[list[int]] = torch.cat([answer.positions, decoded], dim=1).tolist()
    return found


@pytest.mark.parametrize(("name", "rate", "chunk"), JOBS)
def test_tokens_and_positions_are_those_outside_vllm(answers, bundle, written, answered, name, rate, chunk):
    expected = answered(name, rate)
    options = {"max_num_batched_tokens": chunk, "enable_chunked_prefill": True} if chunk else {}
    limits = {"limit_mm_per_prompt": {"image": 2, "video": 2}}
    checkpoint = FOLDER / name / "checkpoint"
    found = answers(
        written(name), [*expected], bundle(checkpoint), checkpoint=checkpoint, **options, **limits
    )
    for each, answer in expected.items():
        assert found["positions"][each] == positions(answer), each
        assert found["tokens"][each] == list(answer.token_ids), each


def test_a_server_gives_these_tokens_in_chunks_and_many_at_once(serve, bundle, written, answered):
    """Chunks end wherever requests beside each other let them."""
    name = "e2e_qwen3_vl"
    expected, checkpoint = answered(name, 0.5), FOLDER / name / "checkpoint"
    folder = written(name)
    chosen = [case for case in json.loads((folder / "cases.json").read_text()) if case["name"] in expected]
    # The client names one rate for a request.
    chosen = [case for case in chosen if len({each["fps"] for each in case["media"]} - {None}) < 2]
    truths = [case for case in cases(name) if case["q"] == 0.5]
    requests = [recorded(folder, case) for case in chosen]
    requests += [recorded(FOLDER / name, case) for case in truths]
    wanted = [list(expected[case["name"]].token_ids) for case in chosen]
    wanted += [case["token_ids"] for case in truths]
    options = ("--video-pruning-rate", "0.5", "--max-num-batched-tokens", "48", "--enable-chunked-prefill")
    with serve(checkpoint, bundle(checkpoint), *options) as started:
        assert started.answer(requests) == wanted
        assert started.answer(requests * 2, at_once=8) == wanted * 2
