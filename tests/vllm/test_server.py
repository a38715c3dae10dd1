"""A server process of vLLM with a bundle as the tower, and the OpenAI client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError
from PIL import Image
from safetensors.numpy import load_file

from tests.golden_data import FOLDER
from tests.vllm.conftest import ROOT
from tests.vllm.test_tokens import cases

E2E = FOLDER / "e2e"
# Megabytes of all processes of the server over 448 requests; measured: 2.0.
FLAT = 6
# Writes messages as they are given; those of the checkpoints add a system message.
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


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


class Server:
    """A client of the server process."""

    def __init__(self, port: int, process: subprocess.Popen) -> None:
        self.port, self.process = port, process

    async def _answer(self, client: AsyncOpenAI, request: dict) -> list[int] | str:
        try:
            answer = await client.chat.completions.create(
                model="tiny", temperature=0, **{"max_tokens": 32, **request}
            )
        except BadRequestError as error:
            return str(error)
        found: list[int] = answer.choices[0].model_extra["token_ids"]
        return found

    def answer(self, requests: list[dict], at_once: int = 1) -> list[list[int] | str]:
        """Send requests, so many at once; return tokens, or the words of a refusal."""

        async def all_of_them() -> list[list[int] | str]:
            gate = asyncio.Semaphore(at_once)
            async with AsyncOpenAI(
                base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=300
            ) as client:

                async def one(request: dict) -> list[int] | str:
                    async with gate:
                        return await self._answer(client, request)

                return await asyncio.gather(*map(one, requests))

        return asyncio.run(all_of_them())

    @property
    def megabytes(self) -> float:
        """Resident memory of the server and of the process of its engine."""
        pages = 0
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getsid(int(process.name)) == self.process.pid:
                    pages += int((process / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(scope="session")
def serve(tmp_path_factory) -> Callable[..., Any]:
    @contextmanager
    def served(checkpoint: Path, bundle: Path, *options: str) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("server")
        (folder / "template.jinja").write_text(TEMPLATE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        entry = {"vlexport": {"bundle": str(bundle), "threads": 1}}
        words = [
            *(sys.executable, "-m", "tests.vllm.serve", str(checkpoint), "--host", "127.0.0.1"),
            *("--port", str(port), "--served-model-name", "tiny", "--additional-config", json.dumps(entry)),
            *("--chat-template", str(folder / "template.jinja"), "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "2048", "--max-num-seqs", "8", "--mm-processor-cache-gb", "0"),
            # As many as eight of the longest take: memory of others is not touched before it is used.
            *("--num-gpu-blocks-override", "136"),
            *("--trust-request-mm-kwargs", "--no-enable-prefix-caching"),
            *("--limit-mm-per-prompt", '{"image": 2, "video": 2}'),
            *options,
        ]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ
            )
        try:
            _wait(port, process, folder / "log")
            yield Server(port, process)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    return served


def _wait(port: int, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no answer from the server: {log.read_text()[-8000:]}")


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
