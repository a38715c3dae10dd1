"""A failing disk and a machine that runs out of something are no fault of a path, wherever it is opened."""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bundle.examples import store
from tests.cli.lines import vlexport
from vlexport.bundle import Bundle, Trust
from vlexport.bundle.trust import Newer, Verdicts
from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.source import read_json
from vlexport.cli.collection import list_items
from vlexport.cli.options import PrunedMedia
from vlexport.errors import ResourceError, VlexportError
from vlexport.evaluate.tasks import read_task
from vlexport.media import read_image, read_video
from vlexport.media.listing import files_of
from vlexport.recipe import read_card
from vlexport.reports.compare import compare
from vlexport.runtime.outputs import outcome_of
from vlexport.system import MappedFile, check_folder, make_folder, release, shortage

DIGEST = "0" * 64
CODES = {errno.EIO: 1, errno.EMFILE: 7, errno.ENFILE: 7, errno.ENOMEM: 7}

NO_MEDIA = PrunedMedia(files=[], image=[], video=[], fps=None, prune=None, method=None, prune_before=None)


@contextmanager
def failing(folder: Path, number: int) -> Iterator[None]:
    """Fail every look at what is in the folder."""

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any = ".", *rest: Any, **named: Any) -> Any:
            at = Path(f"/proc/self/fd/{named['dir_fd']}").readlink() if named.get("dir_fd") else Path()
            if not isinstance(path, int) and (at / os.fsdecode(path)).is_relative_to(folder):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *rest, **named)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", wrapped(io.open))
        for name in ("open", "stat", "lstat", "mkdir", "scandir"):
            patch.setattr(os, name, wrapped(getattr(os, name)))
        yield


def ways(folder: Path, bundle: Path, data: Path) -> dict[str, Callable[[], object]]:
    """Everything that opens a path of the user's."""
    file, opened = folder / "file", Bundle.open(bundle, user_data=data, verify="lazy")
    return {
        "image": lambda: read_image(file),
        "video": lambda: read_video(file),
        "media folder": lambda: list(files_of(folder)),
        "checkpoint": lambda: Checkpoint.open(folder),
        "checkpoint by name": lambda: Checkpoint.open(str(folder)),
        "file of a checkpoint": lambda: read_json(folder, "file"),
        "recipe": lambda: read_card(file),
        "list": lambda: list(list_items(NO_MEDIA, [file], without=data)),
        "task": lambda: read_task(file),
        "result": lambda: compare(file, file),
        "bundle": lambda: Bundle.open(bundle, user_data=data),
        "payload": lambda: opened.read("engine.bin"),
        "trust": lambda: Trust(folder=folder).knows(DIGEST),
        "verdict": lambda: Verdicts(folder=folder).read(DIGEST),
        "newer": lambda: Newer(folder=folder).read(DIGEST),
        "place of bundles": lambda: check_folder(folder / "new"),
        "new place of bundles": lambda: make_folder(folder / "new"),
    }


def test_a_failure_of_the_machine_is_no_wrong_request_wherever_a_path_is_opened(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    folder, data = tmp_path / "given", tmp_path / "data"
    bundle = store(folder / "bundles", data).path
    (folder / "file").write_bytes(b"content")
    for number, code in CODES.items():
        for name, way in ways(folder, bundle, data).items():
            with subtests.test(f"{name}, {errno.errorcode[number]}"):
                # A folder that fails is met before its file.
                place = bundle / "engine.bin" if name == "payload" else folder
                with failing(place, number), pytest.raises((VlexportError, OSError)) as caught:
                    way()
                found = outcome_of(caught.value)
                assert (found.exit_code, found.temporary) == (code, True), found
                assert os.strerror(number) in str(found)
                assert "bug" not in str(found)


def test_a_failure_of_the_machine_has_its_exit_code_for_each_file_of_a_command(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    file = folder / "file"
    file.write_bytes(b"")
    commands = {
        "--config": ("build", "x", "--config", file),
        "--write-config": ("build", "x", "--write-config", file),
        "graph": ("compare", file.with_suffix(".onnx"), file),
    }
    for number, code in CODES.items():
        for name, words in commands.items():
            with subtests.test(f"{name}, {errno.errorcode[number]}"):
                with failing(folder, number):
                    ran = vlexport(*words)
                assert ran.code == code, ran.err
                assert os.strerror(number) in ran.err


WRAPPED = [
    (MemoryError(), "memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        "memory"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
    (RuntimeError("std::bad_alloc"), "memory"),
    (RuntimeError("can't start new thread"), "memory"),
    (ImportError("/usr/lib/state.so: failed to map segment from shared object"), "memory"),
    (OSError(12, "Cannot allocate memory"), "memory"),
    (OSError(28, "No space left on device"), "disk"),
    (OSError(27, "File too large"), "disk"),
    (OSError(122, "Disk quota exceeded"), "disk"),
    (ValueError("I/O error: No space left on device (os error 28)"), "disk"),
]  # fmt: skip


def test_what_ran_out_is_distinguished_from_what_libraries_make_of_it(tmp_path, subtests):
    for error, what in WRAPPED:
        with subtests.test(repr(error)):
            assert what in str(shortage(error))
            outer = RuntimeError("the exporter failed")
            outer.__cause__ = error
            assert isinstance(shortage(outer), ResourceError)
    named = OSError(2, "No such file", "/out of memory/no space left/too many open files")
    for other in (RuntimeError("Guard failed"), OSError(2, "No such file"), ValueError("x"), named):
        assert shortage(other, tmp_path, tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_pages_of_a_file_are_released_in_all_its_mappings_but_written_ones(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"1" * 2**20)

    def resident() -> int:
        sizes = [0]
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
            if "-" in line.split()[0]:
                ours = line.endswith(str(path))
            elif ours and line.startswith("Rss:"):
                sizes.append(int(line.split()[1]))
        return sum(sizes)

    with path.open("rb") as file:
        view = memoryview(MappedFile(file.fileno()))
        written = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    with Path(view.obj.path).open("rb") as file:  # type: ignore[attr-defined]
        library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    written[:] = b"2" * 2**20
    assert bytes(view) == library[:]
    assert resident() == 3 * 1024
    release(view)
    assert resident() == 1024
    assert (written[:], library[:]) == (b"2" * 2**20, b"1" * 2**20)


def test_a_mapped_file_is_released_where_a_system_does_not_list_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(b"1" * 2**20)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    with (tmp_path / "weights").open("rb") as file:
        view = memoryview(mapped := MappedFile(file.fileno()))
    monkeypatch.setattr(Path, "read_text", None)
    release(view)
    assert (mapped.path, bytes(view)) == (None, b"1" * 2**20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_memory_in_place_of_a_mapping_that_a_thread_closes_meanwhile_keeps_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(b"1" * 2**20)
    with (tmp_path / "weights").open("rb") as file:
        kept, closed = (MappedFile(file.fileno()) for _ in range(2))
    place, system = np.frombuffer(closed, np.uint8).ctypes.data, ctypes.CDLL(None)
    system.mmap.argtypes, system.mmap.restype = [ctypes.c_size_t] * 6, ctypes.c_void_p
    read, others = Path.read_text, []

    def read_text(path: Path, *words: Any, **named: Any) -> str:
        text = read(path, *words, **named)
        if str(path) == "/proc/self/maps" and not closed.closed:
            closed.close()
            # MAP_FIXED_NOREPLACE, MAP_ANONYMOUS, MAP_PRIVATE; to be read and written, without a file.
            assert system.mmap(place, 2**20, 3, 0x100022, 2**64 - 1, 0) == place
            others.append((ctypes.c_char * 2**20).from_address(place))
            others[0].raw = b"2" * 2**20
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    kept.release()
    assert others[0].raw == b"2" * 2**20
