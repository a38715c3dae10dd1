"""Requests of the OpenAI client to a server of vLLM with a bundle as the tower."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tests.golden_data import FOLDER
from tests.vllm.client import Server
from tests.vllm.test_plugin import cases

E2E = FOLDER / "e2e"
# Megabytes of all processes of the server over 448 requests; measured: 2.0.
FLAT = 6


def png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def image_part(pixels: np.ndarray) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(pixels)}"}}


def video_part(frames: np.ndarray) -> dict:
    """Frames one after another; vLLM takes them under this name whatever their format."""
    url = f"data:video/jpeg;base64,{','.join(map(png, frames))}"
    return {"type": "video_url", "video_url": {"url": url}}


def recorded(folder: Path, case: dict) -> dict:
    """A recorded request as the client sends it."""
    media = load_file(folder / case["file"]) if case["media"] else {}
    parts = iter(
        (video_part if about["kind"] == "video" else image_part)(media[f"media{at}.raw"])
        for at, about in enumerate(case["media"])
    )
    messages = [
        {
            "role": role,
            "content": [
                next(parts) if "_pad" in words else {"type": "text", "text": words}
                for words in re.split(r"(<\|vision_start\|>.*?<\|vision_end\|>)", text)
                if words
            ],
        }
        for role, text in re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", case["prompt"], re.DOTALL)
    ]
    extra: dict[str, Any] = {"return_token_ids": True}
    fps = [about["fps"] for about in case["media"] if about["kind"] == "video"]
    if fps:
        extra["media_io_kwargs"] = {"video": {"fps": fps[0]}}
    return {"messages": messages, "extra_body": extra}


@pytest.fixture(scope="module")
def server(serve, bundle) -> Iterator[Server]:
    """A server of the recorded Qwen2.5-VL checkpoint, without pruning."""
    with serve(E2E / "checkpoint", bundle(E2E / "checkpoint")) as started:
        yield started


# Embeddings in the place of a video are not for this client.
PLAIN = [case for case in cases("e2e") if not case["q"] and not case["embeds"]]


def test_recorded_requests_give_their_tokens_one_by_one_and_eight_at_once(server):
    """A client that waits for each answer, and one that does not; images and videos mixed."""
    requests = [recorded(E2E, case) for case in PLAIN]
    expected = [case["token_ids"] for case in PLAIN]
    assert server.answer(requests) == expected
    assert server.answer(requests * 2, at_once=8) == expected * 2


def test_a_corrupt_image_fails_alone(server):
    requests = [recorded(E2E, case) for case in PLAIN[:8]]
    broken = json.loads(json.dumps(requests[1]).replace("base64,iVBOR", "base64,AAAAA"))
    assert broken != requests[1]
    found = server.answer([*requests[:4], broken, *requests[4:]], at_once=9)
    assert "400" in found.pop(4)
    assert found == [case["token_ids"] for case in PLAIN[:8]]


def test_memory_is_flat_over_500_requests(server):
    """Pictures of 64 shapes, each with other pixels: tables of grids come and go, nothing is met twice.

    One by one: with several at once nearly every step has a batch of new sizes, for which torch keeps
    prepared products. That grows with stock vLLM as well, by more (docs/serving.md).
    """
    random = np.random.default_rng(0)

    def batch() -> list[dict]:
        sides = [(28 * (1 + n % 8), 28 * (1 + n // 8)) for n in range(64)]
        pictures = [random.integers(0, 256, (*side, 3), dtype=np.uint8) for side in sides]
        text = {"type": "text", "text": "describe the image"}
        return [
            {
                "messages": [{"role": "user", "content": [image_part(each), text]}],
                "max_tokens": 4,
                "extra_body": {"return_token_ids": True},
            }
            for each in pictures
        ]

    sizes = []
    for _ in range(9):
        answers = server.answer(batch())
        assert [each for each in answers if isinstance(each, str)] == []
        sizes.append(server.megabytes)
    # Requests 129 to 576 after 128 that fill what is kept.
    assert sizes[-1] - sizes[1] < FLAT, sizes


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.75])
def test_pruned_videos_give_the_recorded_tokens(serve, bundle, rate):
    chosen = [case for case in cases("e2e") if case["q"] == rate]
    checkpoint = E2E / "checkpoint"
    with serve(checkpoint, bundle(checkpoint), "--video-pruning-rate", str(rate)) as started:
        found = started.answer([recorded(E2E, case) for case in chosen])
    assert found == [case["token_ids"] for case in chosen]


@pytest.mark.parametrize("name", ["e2e_qwen2_vl", "e2e_qwen3_vl"])
def test_recorded_requests_of_other_families_give_their_tokens(serve, bundle, name):
    chosen = [case for case in cases(name) if not case["q"] and case["name"] != "video_sampled"]
    chosen = [case for case in chosen if len({each.get("fps") for each in case["media"]} - {None}) < 2]
    folder = FOLDER / name
    with serve(folder / "checkpoint", bundle(folder / "checkpoint")) as started:
        found = started.answer([recorded(folder, case) for case in chosen], at_once=8)
    assert found == [case["token_ids"] for case in chosen]
