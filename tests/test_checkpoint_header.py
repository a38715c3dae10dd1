"""Headers of safetensors files: as strict as the format, and every refusal is our own error."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.thirty import cases
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError


def one_file(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A checkpoint whose only safetensors file has this header, as JSON or as raw bytes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(raw) if length is None else length)
    (folder / "model.safetensors").write_bytes(size + raw + data)
    return folder


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ENTRY = json.dumps(entry("F32", [1], 0, 4)).encode()
BROKEN: list[tuple[object, bytes, str]] = [
    (b"", b"", "does not begin with '{'"),
    (b" {}", b"", "does not begin with '{'"),
    (b"{", b"", "is not valid JSON"),
    (b'{"a": 1, "a": 1}', b"", "duplicate key 'a'"),
    (b'{"a": %b, "a": %b}' % (ENTRY, ENTRY), b"0" * 4, "duplicate key 'a'"),
    ({"a": entry("F99", [1], 0, 4)}, b"0" * 4, "unknown variant `F99`, expected one of"),
    (
        {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)},
        b"0" * 4,
        "invalid offset for tensor `[ab]`",
    ),
    ({"a": entry("F32", [1], 4, 8)}, b"0" * 8, "invalid offset for tensor `a`"),
    ({"a": entry("F32", [2], 0, 4)}, b"0" * 4, "invalid shape, data type, or offset"),
    (
        {"a": entry("F32", [-1], 0, 4)},
        b"0" * 4,
        r"tensor 'a' is .*\[-1\].*; expected dtype, shape and data_offsets",
    ),
    ({"a": entry("F32", [True], 0, 4)}, b"0" * 4, r"tensor 'a' is .*\[True\].*; expected dtype, shape"),
    ({"a": entry("F32", [2**62, 2**62], 0, 4)}, b"0" * 4, "overflow computing buffer size"),
    ({"a": entry("U8", [1] * 65, 0, 1)}, b"0", "at most 64 sizes"),
    ({"a": entry("F32", [2**63, 0], 0, 0)}, b"", r"at most 64 sizes below 2\^63"),
    ({"a": entry("F32", [1], 4, 0)}, b"0" * 4, "invalid offset for tensor `a`"),
    ({"a": entry("F32", [1], 0, 4)}, b"0" * 5, "file not fully covered"),
    ({"a": entry("F32", [1], 0, 4)}, b"", "is truncated"),
    ({"a": {"dtype": "F32", "shape": [1]}}, b"", "expected dtype, shape and data_offsets"),
    ({"a": 3}, b"", "tensor 'a' is 3; expected dtype, shape and data_offsets"),
    # As serde reads a structure and a choice, too.
    ({"a": ["F32", [1], [0, 4]]}, b"0" * 4, "expected dtype, shape and data_offsets"),
    ({"a": {**entry("F32", [1], 0, 4), "dtype": {"F32": None}}}, b"0" * 4, "expected dtype, shape"),
    ({"__metadata__": {"n": 1}}, b"", "integer `1`, expected a string"),
]


def test_a_broken_header_is_refused(tmp_path, subtests):
    for number, (header, data, message) in enumerate(BROKEN):
        folder = one_file(tmp_path / "c", header, data)
        with subtests.test(f"{number}: {message}"), pytest.raises(CheckpointError, match=message):
            Checkpoint.open(folder).tensor_names()


def test_a_header_longer_than_the_file_and_an_empty_file_are_refused(tmp_path):
    for length in (2**63, 100_000_001, 3):
        with pytest.raises(CheckpointError, match=rf"claims {length} bytes; expected at most 2"):
            Checkpoint.open(one_file(tmp_path / "c", {}, length=length)).tensor_names()
    (tmp_path / "c" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="it has 0 bytes; expected a header"):
        Checkpoint.open(tmp_path / "c").tensor_names()


SHAPES = st.lists(st.integers(0, 3), max_size=3)
TENSORS = st.tuples(st.sampled_from(["F32", "BF16", "U8", "F4", "F8_E4M3"]), SHAPES)
SIZES = st.integers(0, 3) | st.sampled_from([-1, 2**32, 2**63, 2**64])
WILD = st.builds(
    entry,
    st.sampled_from(["F32", "U8", "F6_E2M3", "X"]),
    st.lists(SIZES, max_size=3),
    st.integers(0, 12),
    st.integers(0, 24),
)
BITS = {"F32": 32, "BF16": 16, "U8": 8, "F4": 4, "F8_E4M3": 8}


def laid_out(tensors: list[tuple[str, list[int]]]) -> tuple[dict[str, object], int]:
    """A header whose tensors follow each other, and the bytes that they need."""
    header: dict[str, object] = {}
    end = 0
    for index, (dtype, shape) in enumerate(tensors):
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[f"t{index}"] = entry(dtype, shape, begin, end)
    return header, end


def agrees_with_the_library(folder: Path) -> None:
    try:
        names = Checkpoint.open(folder).tensor_names()
    except CheckpointError:
        names = None
    try:
        with safe_open(folder / "model.safetensors", framework="np") as file:
            known = tuple(sorted(file.keys()))
    except SafetensorError:
        known = None
    assert names == known


@settings(max_examples=150, deadline=None, derandomize=True)
@given(tensors=st.lists(TENSORS, max_size=4), more=st.sampled_from([0, 0, 0, 1, -1]))
def test_what_the_safetensors_library_takes_is_taken(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, list[int]]], more: int
) -> None:
    header, size = laid_out(tensors)
    agrees_with_the_library(
        one_file(tmp_path_factory.getbasetemp() / "sound", header, b"0" * max(0, size + more))
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(header=st.dictionaries(st.text("abc", max_size=2), WILD, max_size=3), size=st.integers(0, 24))
def test_what_the_safetensors_library_refuses_is_refused(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, object], size: int
) -> None:
    agrees_with_the_library(one_file(tmp_path_factory.getbasetemp() / "wild", header, b"0" * size))


FLIPS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.mark.thirty("damaged safetensors files", cases("damaged safetensors files"))
@settings(max_examples=cases("damaged safetensors files"), deadline=None, derandomize=True)
@given(flips=FLIPS, cut=st.integers(0, 9))
def test_damaged_files_raise_only_our_own_error(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int
) -> None:
    header = {f"visual.{index}": entry("F32", [2], 8 * index, 8 * index + 8) for index in range(4)}
    folder = one_file(tmp_path_factory.getbasetemp() / "damaged", header, b"0" * 32)
    raw = bytearray((folder / "model.safetensors").read_bytes())
    for at, value in flips:
        raw[at % len(raw)] = value
    (folder / "model.safetensors").write_bytes(raw[: len(raw) - cut])
    with contextlib.suppress(CheckpointError):
        checkpoint = Checkpoint.open(folder)
        checkpoint.read(checkpoint.tensor_names())
