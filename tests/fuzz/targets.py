"""Parsers of strangers' bytes, by name: each raises errors of ours alone, whatever the bytes."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

from vlexport.bundle import Manifest
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.files import read_header
from vlexport.errors import VlexportError
from vlexport.evaluate.tasks import read_task
from vlexport.media import MediaLimits, images, videos
from vlexport.media.arrays import read_npy
from vlexport.onnx.header import check_model
from vlexport.recipe import find_recipe
from vlexport.runtime.collection import read_list
from vlexport.runtime.request import Generation, Request

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
PROCESSOR = HERE.parent / "golden" / "e2e" / "checkpoint" / "preprocessor_config.json"
# An image of these limits takes a millisecond.
LIMITS = MediaLimits(max_pixels=4096, max_file_bytes=2**16, max_decoded_bytes=2**20, deadline_seconds=5)
EXPECTED = {2, 5, 6, 7}


def manifest(raw: bytes) -> None:
    found = Manifest.parse(raw)
    assert found.encoded() == raw


def safetensors(raw: bytes) -> None:
    with _file(raw) as file:
        found = read_header(file, "model.safetensors", "model.safetensors")
    for tensor in found.values():
        assert 0 <= tensor.start <= tensor.start + tensor.num_bytes <= len(raw)


@cache
def _folder() -> Path:
    """Return a folder in memory with all of a checkpoint but its config."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="vlexport-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copy(PROCESSOR, folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def _file(raw: bytes) -> BufferedReader:
    path = _folder() / "file"
    path.write_bytes(raw)
    return path.open("rb")


def config(raw: bytes) -> None:
    """Read a config by every family that has one of its own."""
    (_folder() / "config.json").write_bytes(raw)
    checkpoint = Checkpoint.open(_folder())
    for name in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "minicpmv", "kimi_vl", "nemotron_vl"):
        recipe = find_recipe(name)
        try:
            recipe.profiles(recipe.read_config(checkpoint))
        except VlexportError as error:
            _judge(error)


def image(raw: bytes) -> None:
    images.read_header("it", raw)
    images.read_image(raw, LIMITS)


def video(raw: bytes) -> None:
    """Find the container, which decides what the decoder's process may open."""
    with _file(raw) as file:
        videos.container_of(file, "it")


def npy(raw: bytes) -> None:
    with _file(raw) as file:
        read_npy(file, "it", LIMITS)


def request(raw: bytes) -> None:
    """Make requests of JSON: fields of a request and of its generation, lines of a list, lines of a task."""
    list(read_list(raw.splitlines(), "list"))
    (_folder() / "task.jsonl").write_bytes(raw)
    read_task(_folder() / "task.jsonl")
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict):
        generation = given.pop("generation", {})
        known = generation if isinstance(generation, dict) else {}
        Request(**_of(Request, given), generation=Generation(**_of(Generation, known)))


def _of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in given.items() if name in names}


def onnx(raw: bytes) -> None:
    check_model(raw, {"model.weights": 64})


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (manifest, safetensors, config, image, video, npy, request, onnx)
}


def call(name: str, raw: bytes) -> None:
    """Call a target; what it may not raise comes out."""
    try:
        TARGETS[name](raw)
    except VlexportError as error:
        _judge(error)


def _judge(error: VlexportError) -> None:
    assert error.exit_code in EXPECTED, error


def corpus(name: str) -> Iterator[Path]:
    """Yield the files of a target in the repository: seeds, and crashes by their name."""
    yield from sorted((CORPUS / name).iterdir())
