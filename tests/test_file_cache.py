"""Files in the user's cache folder: names, limits, and of too many those go that were used least recently."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from vlexport.bundle import user_folders as file_cache
from vlexport.bundle.user_folders import CacheFile


def test_the_least_recently_used_file_goes_first(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(file_cache, "MOST_FILES", 2)
    first, second, third = (CacheFile.of("graphs", name) for name in ("first", "second", "third"))
    for at, each in enumerate((first, second)):
        each.write(b"x")
        os.utime(each.path, (at, at))
    assert first.read() == b"x"
    third.write(b"y")
    assert (first.read(), second.read(), third.read()) == (b"x", b"", b"y")


@pytest.fixture
def file(tmp_path: Path) -> CacheFile:
    return CacheFile(path=tmp_path / "tensorrt" / "some.cache")


def test_what_was_written_is_read_and_nothing_else_is_left(file: CacheFile):
    assert file.read() == b""
    file.write(b"one")
    file.write(b"two")
    assert file.read() == b"two"
    assert [each.name for each in file.path.parent.iterdir()] == ["some.cache"]


def test_a_file_is_named_by_everything_that_it_depends_on():
    path = CacheFile.of("tensorrt", "timings", "tensorrt", "11.2.0", "sm90").path
    assert re.fullmatch(r"timings-tensorrt-11\.2\.0-sm90-[0-9a-f]{16}\.cache", path.name)
    assert str(path).startswith(os.environ["XDG_CACHE_HOME"])
    assert CacheFile.of("tensorrt", "../up", "a/b").path.name.startswith(".._up-a_b-")


def test_too_much_is_neither_written_nor_read(file: CacheFile, monkeypatch: pytest.MonkeyPatch):
    file.write(b"before")
    monkeypatch.setattr(file_cache, "MOST_BYTES", 5)
    file.write(b"larger")
    assert file.path.read_bytes() == b"before"
    assert file.read() == b""


def test_a_place_that_cannot_be_written_to_is_a_warning(tmp_path: Path, file: CacheFile, caplog):
    (tmp_path / "tensorrt").write_text("a file")
    with caplog.at_level(logging.WARNING):
        file.write(b"x")
        assert file.read() == b""
    assert "some.cache cannot be written" in caplog.text
