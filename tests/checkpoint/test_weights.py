"""Headers, names, shapes and shards: as strict as the format; what is missing, left over or misplaced."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tests.thirty import cases
from tests.tiny_qwen2_5_vl import Tiny, tower_tensors, write_tiny_qwen2_5_vl
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


@pytest.mark.seconds
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


PREFIXES = ("visual.", "model.visual.")
INDEX = "model.safetensors.index.json"
EXPECTED = {name: tensor.shape for name, tensor in tower_tensors(Tiny(depth=1)).items()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("weights") / "tiny", depth=1, shards=2)


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copied"))


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> Path:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_both_generations_of_names_resolve(tmp_path):
    for naming in PREFIXES:
        checkpoint = Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path / naming, depth=1, naming=naming))
        prefix = checkpoint.resolve_prefix(PREFIXES)
        assert prefix == naming
        assert checkpoint.check_names(EXPECTED, prefix) == {name: naming + name for name in EXPECTED}


def without(name: str) -> dict[str, tuple[int, ...]]:
    return {each: tuple(shape) for each, shape in EXPECTED.items() if each != name}


REFUSED: dict[str, tuple[Callable[[Checkpoint], object], str]] = {
    "no tower": (lambda it: it.resolve_prefix(("vision_tower.", "vit.")),
        r"no tensor below 'vision_tower\.', 'vit\.'; its names begin with lm_head\., model\., visual\."),
    "two sets of names": (lambda it: it.resolve_prefix(("visual.", "model.")),
        r"tensors below 'visual\.' and 'model\.'; expected one of"),
    "missing": (lambda it: it.check_names({**EXPECTED, "blocks.7.b": (64,), "blocks.7.a": (64,)}, "visual."),
        r"lacks 2 of 20 expected tensors below 'visual\.': visual\.blocks\.7\.a, visual\.blocks\.7\.b\."),
    "unexpected": (lambda it: it.check_names(without("merger.ln_q.weight"), "visual."),
        r"has 1 unexpected tensors below 'visual\.': visual\.merger\.ln_q\.weight; expected 17"),
    "misshaped": (lambda it: it.check_names({**EXPECTED, "merger.ln_q.weight": (32,)}, "visual."),
        r"1 tensors of another shape .*: visual\.merger\.ln_q\.weight \[64\] instead of \[32\]"),
    "a long list": (
        lambda it: it.check_names({f"x.{index:02d}": (1,) for index in reversed(range(30))}, "visual."),
        r"lacks 30 of 30 .*visual\.x\.00, visual\.x\.01, .*visual\.x\.09 and 20 more"
    ),
    "unknown": (lambda it: it.stored("visual.absent"), r"has no tensor 'visual\.absent'"),
}  # fmt: skip


def test_names_and_shapes_that_differ_are_listed(tiny, subtests):
    for name, (read, message) in REFUSED.items():
        with subtests.test(name), pytest.raises(CheckpointError, match=message):
            read(Checkpoint.open(tiny))


def test_shapes_and_dtypes_are_known_without_reading(tiny: Path) -> None:
    stored = Checkpoint.open(tiny).stored("visual.patch_embed.proj.weight")
    assert (stored.dtype, stored.shape, stored.num_bytes) == ("float32", (64, 3, 2, 14, 14), 64 * 1176 * 4)


def without_weights(folder: Path) -> Path:
    for path in folder.glob("model*"):
        path.unlink()
    return folder


def test_pickles_are_never_loaded(copied, subtests):
    without_weights(copied)
    for suffix in ("bin", "pt", "pth", "ckpt"):
        path = copied / f"pytorch_model.{suffix}"
        path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
        words = r"pickles only.*runs code, so vlexport never does\. Convert"
        with subtests.test(suffix), pytest.raises(CheckpointError, match=words):
            Checkpoint.open(copied)
        path.unlink()


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def place(file: Any) -> Callable[[Path], object]:
    """Let the index place a tensor in another file."""
    return lambda folder: edit_index(folder, lambda names: names.update({"visual.merger.ln_q.weight": file}))


def twice(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder / "model-3.safetensors")
    edit_index(folder, lambda names: names.update({"extra": "model-3.safetensors"}))


OUTSIDE = r"places tensor 'visual\.merger\.ln_q\.weight' in .*next to the index"
EMPTY = "'weight_map' is missing or empty"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (without_weights, r"holds no weights; expected model\.safetensors or"),
    "no index": (lambda it: (it / INDEX).unlink(), r"model-00002-of-00002\.safetensors, but neither"),
    "two sets": (lambda it: shutil.copy(it / FIRST, it / "model.safetensors"), "expected one set of weights"),
    "no shard": (lambda it: (it / SECOND).unlink(), r"shard model-00002-.* is missing, .* \d+ tensors"),
    "above": (place("../model.safetensors"), OUTSIDE),
    "elsewhere": (place("/tmp/x.safetensors"), OUTSIDE),
    "below": (place("sub/x.safetensors"), OUTSIDE),
    "another kind": (place("x.bin"), OUTSIDE),
    "a folder": (place(".."), OUTSIDE),
    "nothing": (place(""), OUTSIDE),
    "a drive": (place("C:x.safetensors"), OUTSIDE),
    "a number": (place(3), OUTSIDE),
    "the wrong shard": (place(FIRST), r"in other shards|lacks 1 tensors"),
    "in two shards": (twice, r"model-3\.safetensors holds \d+ tensors that .* in other shards"),
    "a name twice": (
        lambda it: (it / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "duplicate key 'a'"
    ),
    "no map": (lambda it: (it / INDEX).write_text("{}"), EMPTY),
    "an empty map": (lambda it: (it / INDEX).write_text('{"weight_map": {}}'), EMPTY),
    "a list": (lambda it: (it / INDEX).write_text('{"weight_map": []}'), EMPTY),
    "cut": (lambda it: (it / SECOND).write_bytes((it / SECOND).read_bytes()[:-1]),
        r"model-00002-of-00002\.safetensors is truncated: it holds \d+ bytes"),
}  # fmt: skip


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.read(checkpoint.tensor_names())


def test_shards_and_an_index_that_contradict_each_other_are_refused(tiny, tmp_path, subtests):
    for name, (spoil, message) in SPOILT.items():
        folder = Path(shutil.copytree(tiny, tmp_path / name))
        spoil(folder)
        with subtests.test(name), pytest.raises(CheckpointError, match=message):
            read_all(folder)


def test_a_shard_that_changes_between_header_and_data_is_refused(copied: Path) -> None:
    checkpoint = Checkpoint.open(copied)
    wanted = checkpoint.check_names(EXPECTED, "visual.")
    (copied / SECOND).write_bytes((copied / SECOND).read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        checkpoint.read(wanted)


@pytest.fixture
def tower(tmp_path: Path) -> Checkpoint:
    """A tower with tensors that it has no use for."""
    (tmp_path / "config.json").write_text('{"model_type": "any"}')
    names = ("tower.weight", "tower.bias", "tower.head.weight", "tower.heads.weight", "other.weight")
    tensors = {name: torch.full((2,), float(index)) for index, name in enumerate(names)}
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


def test_ignored_names_may_be_there_and_are_not_read_and_others_are_unexpected(tower: Checkpoint) -> None:
    module = nn.LayerNorm(2)
    tower.load_into(module, prefixes=("tower.",), ignore=("head.", "heads."))
    assert (module.weight.tolist(), module.bias.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert tower.check_names({"weight": (2,)}, "other.", ignore=("head.",)) == {"weight": "other.weight"}
    with pytest.raises(CheckpointError, match=r"1 unexpected tensors below 'tower\.': tower\.heads\.weight"):
        tower.check_names({"weight": (2,), "bias": (2,)}, "tower.", ignore=("head.",))
