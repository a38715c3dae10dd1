"""Digests and bytes of files against another program and another reader, and which files are mapped."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bundle.examples import PAYLOADS, store
from vlexport.bundle import Bundle, files
from vlexport.bundle.files import check_payload, copy_payload, map_payload, read_payload, record_of
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint import files as weight_files
from vlexport.errors import BundleError, InputError
from vlexport.runtime import collection

# Sizes around every border of a chunk, of a part and of several parts.
CHUNK, PART = 64, 256
SIZES = [0, 1, *(border + step for border in (64, 128, 256, 512, 1024) for step in (-1, 0, 1)), 1000]


def random_file(path: Path, size: int) -> bytes:
    path.write_bytes(random.Random(size).randbytes(size))
    return path.read_bytes()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", CHUNK)
    monkeypatch.setattr(files, "PART", PART)
    monkeypatch.setattr(files, "MAPPED_FROM", 1)


def test_digests_of_payloads_are_those_of_hashlib_over_their_bytes(tmp_path, small):
    for size in SIZES:
        content = random_file(tmp_path / str(size), size)
        pieces = [content[at : at + PART] for at in range(0, size, PART)] if size > PART else []
        record = record_of(tmp_path, str(size))
        assert (record.size, record.sha256) == (size, hashlib.sha256(content).hexdigest()), size
        assert record.parts == tuple(hashlib.sha256(piece).hexdigest() for piece in pieces), size


def test_any_reader_of_a_payload_returns_its_bytes_and_refuses_any_other_byte(tmp_path, small):
    """The record is made by hand, not by what reads."""
    for size in SIZES[1:]:
        name = str(size)
        content = random_file(tmp_path / name, size)
        pieces = [content[at : at + PART] for at in range(0, size, PART)] if size > PART else []
        digest, *parts = (hashlib.sha256(each).hexdigest() for each in (content, *pieces))
        record = files.FileRecord(size=size, sha256=digest, parts=tuple(parts))
        readers = {
            "read": lambda record=record, name=name: read_payload(tmp_path, name, record),
            "map": lambda record=record, name=name: bytes(map_payload(tmp_path, name, record)),
        }
        assert {each: read() for each, read in readers.items()} == dict.fromkeys(readers, content), size
        check_payload(tmp_path, name, record)
        copy_payload(tmp_path, name, record, tmp_path / f"{name}-copy")
        assert (tmp_path / f"{name}-copy").read_bytes() == content
        for at in {0, size // 2, size - 1, *(min(each, size - 1) for each in (63, 64, 255, 256, 511))}:
            wrong = bytearray(content)
            wrong[at] ^= 1
            (tmp_path / name).write_bytes(wrong)
            for read in (
                *readers.values(),
                lambda record=record, name=name: check_payload(tmp_path, name, record),
            ):
                with pytest.raises(BundleError, match="has SHA-256"):
                    read()
        (tmp_path / name).unlink()


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum")
def test_digests_of_large_payloads_are_those_of_sha256sum(tmp_path):
    """A part and a byte, most of them zeros."""
    path = tmp_path / "large"
    random_file(path, 1 << 20)
    os.truncate(path, files.PART + 1)
    said = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout
    assert record_of(tmp_path, "large").sha256 == said.split()[0]


def test_digests_of_tensors_are_those_of_the_bytes_that_safetensors_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "_CHUNK", 96)
    source = torch.Generator().manual_seed(0)
    sizes = (1, 11, 12, 13, 24, 25, 3000)
    tensors = {
        f"{dtype}.{size}".removeprefix("torch."): torch.randn(size, generator=source).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for size in sizes
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    found = checkpoint.weights.describe({name: name for name in tensors})
    described = {name: json.loads(each) for name, each in found.items()}
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in stored.items():
        raw = tensor.view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert described[name] == [name, dtype, [len(tensor)], hashlib.sha256(raw).hexdigest()]
    for target in (None, "float32"):
        read = dict(checkpoint.tensors({name: name for name in stored}, dtype=target))
        assert read.keys() == stored.keys()
        for name, tensor in read.items():
            wanted = stored[name] if target is None else stored[name].float()
            assert torch.equal(tensor, wanted), name


def test_digests_of_items_of_a_collection_are_those_of_their_files(tmp_path):
    for size in (1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 7):
        content = random_file(tmp_path / "item", size)
        found = collection._file_facts(str(tmp_path / "item"))
        assert (found["bytes"], found["sha256"]) == (size, hashlib.sha256(content).hexdigest()), size


NAME = "engine.bin"


@pytest.fixture
def bundle(tmp_path: Path, small: None) -> Bundle:
    return store(tmp_path / "engines", tmp_path / "data")


@pytest.mark.parametrize("parts", [(), ("0" * 64,)])
def test_a_record_with_another_number_of_parts_is_refused(bundle, parts):
    with pytest.raises(InputError, match=r"files\.parts"):
        replace(bundle.manifest.files[NAME], parts=parts)


def test_a_large_file_that_nobody_may_write_is_mapped(bundle: Bundle, tmp_path: Path) -> None:
    found = bundle.map(NAME)
    assert isinstance(found.obj, mmap.mmap)
    assert found == PAYLOADS[NAME]
    assert not stat.S_IMODE((bundle.path / NAME).stat().st_mode) & 0o222
    # What is loaded stays when the file is replaced.
    other = tmp_path / "other"
    other.write_bytes(b"\xff" * len(found))
    other.replace(bundle.path / NAME)
    assert found == PAYLOADS[NAME]


def test_a_file_that_somebody_may_write_is_read_not_mapped(bundle: Bundle) -> None:
    path = bundle.path / NAME
    for mode in (0o644, 0o464, 0o446):
        path.chmod(mode)
        found = bundle.map(NAME)
        path.write_bytes(b"\xff" * len(found))
        assert found == PAYLOADS[NAME], oct(mode)
        path.write_bytes(PAYLOADS[NAME])


def test_a_bit_of_any_part_is_refused_where_it_was_begun_before(bundle, tmp_path):
    path, good = bundle.path / NAME, PAYLOADS[NAME]
    for at in range(0, len(good), PART // 2):
        path.unlink()
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        path.chmod(0o444)
        again = Bundle.open(bundle, verify="lazy", user_data=tmp_path / "data")
        again.begin([NAME])
        for read in (again.map, again.read):
            with pytest.raises(BundleError, match="SHA-256"):
                read(NAME)


def test_what_was_begun_is_used_once_and_by_a_bundle_of_the_same_digest_alone(bundle, tmp_path):
    bundle.begin([NAME, "absent"])
    again = Bundle.open(bundle, verify="lazy", user_data=tmp_path / "data")
    begun = again.begun[NAME].result()
    assert again.map(NAME) is begun
    assert again.map(NAME) is not begun
    bundle.begin([NAME])
    assert not Bundle.open(replace(bundle, digest="0" * 64), user_data=tmp_path / "data").begun
