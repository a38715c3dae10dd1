"""What the libraries keep between processes: whole, bounded, ignored where it is wrong; new contexts."""

import logging
import os
from pathlib import Path

import pytest

from tests.backends.stand_in import (
    DATA_CENTRE,
    RTX,
    SILENT,
    DeserialisedEngine,
    HostGpu,
    RuntimeConfig,
)
from vlexport.backends._tensorrt import cache
from vlexport.backends._tensorrt.cache import CacheFile, keep_timings, recall_timings
from vlexport.backends._tensorrt.runner import Contexts
from vlexport.errors import ResourceError


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
    path = CacheFile.of("timings", "tensorrt", "11.2.0", "sm90").path
    assert path.name == "timings-tensorrt-11.2.0-sm90.cache"
    assert str(path).startswith(os.environ["XDG_CACHE_HOME"])
    assert CacheFile.of("../up", "a/b").path.name == ".._up-a_b.cache"


def test_too_much_is_neither_written_nor_read(file: CacheFile, monkeypatch: pytest.MonkeyPatch):
    file.write(b"before")
    monkeypatch.setattr(cache, "MOST_BYTES", 5)
    file.write(b"larger")
    assert file.path.read_bytes() == b"before"
    assert file.read() == b""


def test_of_too_many_files_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "MOST_FILES", 2)
    for age, name in ((30, "a"), (20, "b"), (10, "c")):
        CacheFile(path=tmp_path / f"{name}.cache").write(b"x")
        os.utime(tmp_path / f"{name}.cache", (1000 - age, 1000 - age))
    CacheFile(path=tmp_path / "d.cache").write(b"x")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c.cache", "d.cache"]


def test_a_place_that_cannot_be_written_to_is_told_and_ends_nothing(tmp_path: Path, caplog):
    (tmp_path / "tensorrt").write_text("a file")
    with caplog.at_level(logging.WARNING):
        CacheFile(path=tmp_path / "tensorrt" / "some.cache").write(b"x")
        assert CacheFile(path=tmp_path / "tensorrt" / "some.cache").read() == b""
    assert "some.cache cannot be written" in caplog.text


class Timings:
    """A builder's configuration that takes timings of one GPU."""

    def __init__(self, fits: bytes) -> None:
        self.fits, self.taken = fits, b"?"

    def create_timing_cache(self, content: bytes) -> bytes | None:
        return None if content == b"damaged" else content

    def set_timing_cache(self, timings: bytes, ignore_mismatch: bool) -> bool:
        fine = timings in (b"", self.fits) and not ignore_mismatch
        self.taken = timings if fine else self.taken
        return fine

    def get_timing_cache(self) -> "Timings":
        return self

    def serialize(self) -> bytes:
        return self.taken + b"+"


@pytest.mark.parametrize(
    ("stored", "taken"), [(b"", b""), (b"here", b"here"), (b"elsewhere", b""), (b"damaged", b"")]
)
def test_timings_of_this_gpu_are_used_and_others_ignored(file: CacheFile, stored: bytes, taken: bytes):
    file.write(stored)
    config = Timings(b"here")
    recall_timings(config, file)
    assert config.taken == taken
    keep_timings(config, file)
    assert file.read() == taken + b"+"


@pytest.fixture
def engine() -> DeserialisedEngine:
    return DeserialisedEngine(HostGpu())


def test_the_library_for_rtx_captures_by_itself_and_shares_one_cache(engine, file: CacheFile):
    contexts = Contexts(RTX, engine, SILENT, file)
    made = contexts.create(1, "image", 7)
    contexts.create(0, "image", 7)
    first, second = engine.asked
    assert isinstance(first, RuntimeConfig)
    assert (first.strategy, first.cuda_graph_strategy) == ("by hand", "whole")
    assert first.cache is second.cache is not None
    assert (made.profile, contexts.captures) == (1, True)


def test_kernels_are_kept_when_an_engine_closes_and_found_by_the_next(engine, file: CacheFile):
    Contexts(RTX, engine, SILENT, file).close()
    assert file.read() == b"kernels"
    Contexts(RTX, engine, SILENT, file).close()
    assert file.read() == b"kernelskernels"


def test_kernels_that_do_not_fit_are_compiled_anew(engine, file: CacheFile):
    file.write(b"damaged")
    Contexts(RTX, engine, SILENT, file).close()
    assert file.read() == b"kernels"


def test_the_data_centre_library_has_no_such_cache_and_is_captured_by_us(engine, file: CacheFile):
    contexts = Contexts(DATA_CENTRE, engine, SILENT, file)
    contexts.create(1, "image", 7)
    contexts.close()
    assert (engine.asked, contexts.captures, file.read()) == (["by hand"], False, b"")


def test_no_room_for_a_context_is_told_as_such(engine, file: CacheFile, monkeypatch):
    monkeypatch.setattr(DeserialisedEngine, "create_execution_context", lambda *_: None)
    with pytest.raises(
        ResourceError, match=r"could not make room for profile 'image': the library gives no reason"
    ):
        Contexts(DATA_CENTRE, engine, SILENT, file).create(0, "image", 7)
