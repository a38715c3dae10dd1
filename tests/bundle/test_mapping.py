"""Large payloads: a digest for every part, and what is mapped is what was hashed, where nobody may write."""

from __future__ import annotations

import hashlib
import mmap
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bundle.examples import PAYLOADS, store
from vlexport.bundle import Bundle, files
from vlexport.errors import BundleError, InputError

NAME = "engine.bin"
PART = 512


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART", PART)
    monkeypatch.setattr(files, "MAPPED_FROM", 1024)


@pytest.fixture
def bundle(tmp_path: Path, small: None) -> Bundle:
    return store(tmp_path / "engines", tmp_path / "data")


def test_a_large_file_has_a_digest_for_each_part(bundle: Bundle) -> None:
    content, record = PAYLOADS[NAME], bundle.manifest.files[NAME]
    expected = [hashlib.sha256(content[at : at + PART]).hexdigest() for at in range(0, len(content), PART)]
    assert record.parts == tuple(expected)
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    assert all(not each.parts for each in bundle.manifest.files.values() if each.size <= PART)


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


@pytest.mark.parametrize("begun", [False, True])
def test_a_bit_of_any_part_is_refused_wherever_it_is_read(bundle, tmp_path, begun):
    path, good = bundle.path / NAME, PAYLOADS[NAME]
    for at in range(0, len(good), PART // 2):
        path.unlink()
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        path.chmod(0o444)
        again = Bundle.open(bundle, verify="lazy", user_data=tmp_path / "data")
        if begun:
            again.begin([NAME])
        for read in (again.map, again.read):
            with pytest.raises(BundleError, match="SHA-256"):
                read(NAME)
        with pytest.raises(BundleError, match="SHA-256"):
            Bundle.open(bundle.path, user_data=tmp_path / "data")


def test_what_was_begun_is_used_once_and_by_a_bundle_of_the_same_digest_alone(bundle, tmp_path):
    bundle.begin([NAME, "absent"])
    again = Bundle.open(bundle, verify="lazy", user_data=tmp_path / "data")
    begun = again.begun[NAME].result()
    assert again.map(NAME) is begun
    assert again.map(NAME) is not begun
    bundle.begin([NAME])
    assert not Bundle.open(replace(bundle, digest="0" * 64), user_data=tmp_path / "data").begun
