"""A server process of vLLM with a bundle as the tower, and the OpenAI client."""

from __future__ import annotations

import asyncio
import json
import os
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

import pytest
from openai import AsyncOpenAI, BadRequestError

ROOT = Path(__file__).parents[2]
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
