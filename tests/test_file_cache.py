"""Files in the user's cache folder: of too many, those go that were used least recently."""

from __future__ import annotations

import os

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
